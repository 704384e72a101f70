"""SIGTERM as Ctrl-C, so that whatever ends a supervisor ends its children in order."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """While inside, the first SIGTERM does what Ctrl-C does: KeyboardInterrupt, or what asyncio makes of it.

    Further ones change nothing: `timeout`, for one, sends it to the process and then to its group.
    """

    def interrupt(_number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        on_ctrl_c = signal.getsignal(signal.SIGINT)
        if callable(on_ctrl_c):
            on_ctrl_c(signal.SIGINT, frame)
        else:  # a background job of a shell ignores SIGINT
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
