"""The event loop that server processes run on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from paceline.core import slices

Result = TypeVar("Result")


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run` on uvloop, which takes a message out of gRPC and puts one in with less work; where there
    is none (Windows), on asyncio's own loop. This thread, and those that it starts, carry messages: they ask
    for short slices of a core."""
    slices.shorten()
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)
