"""File descriptors of a process: as many as the system allows, some of them kept free.

A process that has none left accepts nobody and reaches nobody. So what strangers can open is bounded below
that, and links to workers always find one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

KEPT_FREE: Final = 64
"""Descriptors that no connection of a client takes: for links to workers, files, and connections that are
refused, which need one for a moment."""
UNKNOWN_LIMIT: Final = 1024
"""What is assumed where the system does not say."""


def raise_limit() -> None:
    """Let this process, and those that it starts, have as many descriptors as the system allows."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            return  # macOS says "unlimited" and takes less: what there was remains


def connections(ports: int) -> int:
    """How many connections each of `ports` may have: an equal share of what is neither used nor kept free."""
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
