"""Treats SIGTERM like Ctrl-C, so that a supervisor ends its children in order in both cases."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Inside the block, the first SIGTERM acts like Ctrl-C: KeyboardInterrupt, or cancellation by asyncio.

    Further SIGTERMs are ignored, because `timeout`, for example, sends one to the process and one to its
    group.
    """

    def interrupt(_number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        on_ctrl_c = signal.getsignal(signal.SIGINT)
        if callable(on_ctrl_c):
            on_ctrl_c(signal.SIGINT, frame)
        else:  # SIGINT is ignored in a shell's background job
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
