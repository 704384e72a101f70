"""Free memory for this process: of the machine, and within its control groups.

In a container, `/proc/meminfo` shows the machine's memory. The container's limits are those of its control
group and of the groups around it.
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
"""By controller, which version 2 does not name: the files with a group's limit and use, and the line of its
memory.stat with the inactive file cache, which is reclaimable."""


def available_bytes() -> int | None:
    """Bytes that this process can take before the system has to kill a process; None if unknown."""
    free = [*_of_the_machine(), *_of_the_groups()]
    return max(0, min(free)) if free else None


def _of_the_machine() -> Iterator[int]:
    kibibytes = _counter(_MEMINFO, "MemAvailable:")
    if kibibytes is not None:
        yield kibibytes * 1024


def _of_the_groups() -> Iterator[int]:
    """The remaining bytes of each control group with a limit around this process."""
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
    """The number in a file; None for `max` or a missing file."""
    text = " ".join(lines(path))
    return int(text) if text.isdecimal() else None


def _counter(path: Path, name: str) -> int | None:
    """The number after a name at the start of a line."""
    for line in lines(path):
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return None
