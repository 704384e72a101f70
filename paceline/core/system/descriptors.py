"""File descriptors of a process: raised to the system's limit, with some reserved.

A process without free descriptors can neither accept nor open connections. Client connections are therefore
bounded below the limit, so that links to workers always get a descriptor.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

KEPT_FREE: Final = 64
"""Descriptors reserved for links to workers, files, and connections that are refused (one for a moment)."""
UNKNOWN_LIMIT: Final = 1024
"""The limit assumed if the system does not report one."""


def raise_limit() -> None:
    """Raise the descriptor limit of this process and its children to the system's maximum."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            return  # macOS reports "unlimited" but accepts less: keep the old limit


def connections(ports: int) -> int:
    """Connections that each of `ports` may have: an equal share of the unused, unreserved descriptors."""
    return max(1, (_limit() - _open_now() - KEPT_FREE) // ports)


def _limit() -> int:
    if sys.platform == "win32":
        return UNKNOWN_LIMIT
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _open_now() -> int:
    folder = Path("/dev/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else 0
