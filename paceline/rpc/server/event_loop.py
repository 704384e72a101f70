"""The event loop of server processes."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from paceline.core.system import descriptors

Result = TypeVar("Result")


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run` on uvloop, which exchanges messages with gRPC faster; on asyncio's loop without uvloop
    (Windows). Raises the descriptor limit. Until the loop handles SIGINT, it ends the process at once, like
    SIGTERM.
    """
    descriptors.raise_limit()
    _end_by_interrupt()
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


def _end_by_interrupt() -> None:
    """Let SIGINT end the process. asyncio would cancel the main task, which does not notice while it loads a
    model for minutes.

    An ignored SIGINT, as in a shell's background job, stays ignored. On Windows, loops have no signal
    handlers, so asyncio's behaviour is kept.
    """
    if sys.platform != "win32" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
