"""The end of a process whose supervisor is gone: it holds the other end of standard input, a pipe.

However the supervisor ends, that end is closed then.
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
    """Have the loop call `stop` at the end of standard input."""

    def watch() -> None:
        _await_end()
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(stop)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def leave_with_parent(unless: threading.Event) -> None:
    """End the process at the end of standard input, unless it has a better way by then.

    Loading a model, or fetching a tokenizer, may take minutes, in which the event loop does not run. There is
    nothing to put in order yet.
    """

    def watch() -> None:
        _await_end()
        if not unless.is_set():
            with contextlib.suppress(Exception):
                log.warning("standard input has ended, and not all is loaded yet: stopping")
            os._exit(1)

    threading.Thread(target=watch, name="parent-watch-while-loading", daemon=True).start()


def _await_end() -> None:
    with contextlib.suppress(OSError, ValueError):
        while os.read(0, 4096):
            pass
