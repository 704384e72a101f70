"""How much memory this process may still take: of the machine, and of the control groups that bound it.

In a container `/proc/meminfo` is the machine's. What bounds the container is its control group, and those
around it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.core.system.control_groups import groups_around, lines

_MEMINFO = Path("/proc/meminfo")

_LIMIT_USE_CACHE = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By controller, which version 2 does not name: the files that tell a group's limit and its use, and the line
of its memory.stat that says how much of that use are files nobody looks at, which make room for anything."""


def available_bytes() -> int | None:
    """What this process can take before the system has to end something; None where nobody tells."""
    free = [*_of_the_machine(), *_of_the_groups()]
    return max(0, min(free)) if free else None


def _of_the_machine() -> Iterator[int]:
    kibibytes = _counter(_MEMINFO, "MemAvailable:")
    if kibibytes is not None:
        yield kibibytes * 1024


def _of_the_groups() -> Iterator[int]:
    """What each group around this process leaves it, where it has a limit."""
    for controller, names in _LIMIT_USE_CACHE.items():
        for group in groups_around(controller):
            free = _left_by(group, *names)
            if free is not None:
                yield free


def _left_by(group: Path, limit: str, use: str, cache: str) -> int | None:
    bound, used = _number(group / limit), _number(group / use)
    if bound is None or used is None:
        return None
    return bound - used + (_counter(group / "memory.stat", cache) or 0)


def _number(path: Path) -> int | None:
    """What a file holds; None for `max`, and where there is none."""
    text = " ".join(lines(path))
    return int(text) if text.isdecimal() else None


def _counter(path: Path, name: str) -> int | None:
    """The number behind a name at the beginning of a line."""
    for line in lines(path):
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return None
