"""Waiting for a condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

HANG = 240.0
"""Seconds after which a test has failed; nothing waits this long when all is well."""


def until(condition: Callable[[], T], what: str, timeout: float = HANG, pause: float = 0.02) -> T:
    """The first true value of `condition`. Raises TimeoutError saying what never came, and what was last."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{what} did not come within {timeout:g} s; last was {value!r}")
        time.sleep(pause)
