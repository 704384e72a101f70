"""The event loop that server processes run on."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from paceline.core.system import descriptors

Result = TypeVar("Result")


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run` on uvloop, which takes a message out of gRPC and puts one in with less work; where there
    is none (Windows), on asyncio's own loop. The process may have as many file descriptors as the system
    allows. Until the loop has a handler of its own for it, SIGINT ends the process at once, as SIGTERM does.
    """
    descriptors.raise_limit()
    _end_by_interrupt()
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


def _end_by_interrupt() -> None:
    """asyncio would cancel the main task, which does not notice while it loads a model for minutes.

    Who ignores SIGINT, as a shell's background job does, goes on ignoring it. Windows' loops have no handlers
    of signals, so that asyncio's way stays the only one there.
    """
    if sys.platform != "win32" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
