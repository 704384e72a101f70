"""An injectable source of monotonic time."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Monotonic seconds from an arbitrary origin."""

monotonic: Clock = time.monotonic


class ManualClock:
    """A clock that only `advance` moves; for tests and simulation."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
