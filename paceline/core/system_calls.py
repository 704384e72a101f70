"""System calls of Linux that have no wrapper in the C library."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping
from typing import Any


def succeeds(numbers: Mapping[str, int], *args: Any) -> bool:
    """Make the call that has this number on each kind of machine; False where there is none, or it fails."""
    number = numbers.get(platform.machine())
    if platform.system() != "Linux" or number is None:
        return False
    failed: int = ctypes.CDLL(None).syscall(number, *args)
    return not failed
