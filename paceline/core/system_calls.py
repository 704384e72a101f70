"""Linux system calls without a wrapper in the C library."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping
from typing import Any


def succeeds(numbers: Mapping[str, int], *args: Any) -> bool:
    """Make a system call. `numbers` gives its number by machine type. False if unknown or failed."""
    number = numbers.get(platform.machine())
    if platform.system() != "Linux" or number is None:
        return False
    failed: int = ctypes.CDLL(None).syscall(number, *args)
    return not failed
