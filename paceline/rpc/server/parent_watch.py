"""Ends a process when its supervisor is gone.

The supervisor holds the other end of standard input, a pipe that closes however the supervisor ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


def stop_with_parent(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    """Call `stop` in the event loop at the end of standard input."""

    def watch() -> None:
        _await_end()
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(stop)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def leave_with_parent(unless: threading.Event) -> None:
    """Exit at the end of standard input, unless `unless` is set by then.

    For the time of loading, which may take minutes and block the event loop. No clean-up is needed yet.
    """

    def watch() -> None:
        _await_end()
        if not unless.is_set():
            with contextlib.suppress(Exception):
                log.warning("standard input was closed while loading: stopping")
            os._exit(1)

    threading.Thread(target=watch, name="parent-watch-while-loading", daemon=True).start()


def _await_end() -> None:
    with contextlib.suppress(OSError, ValueError):
        while os.read(0, 4096):
            pass
