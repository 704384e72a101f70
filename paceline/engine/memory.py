"""How much memory this process may still take: of the machine, and of the control groups that bound it.

In a container `/proc/meminfo` is the machine's. What bounds the container is its control group's, and those
above it: each may have a limit of its own (https://docs.kernel.org/admin-guide/cgroup-v2.html).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")

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
    for line in _lines(_OWN_GROUPS):
        _, controllers, path = line.split(":", 2)
        for controller, names in _LIMIT_USE_CACHE.items():
            if controller not in controllers.split(","):
                continue
            root = _GROUPS / controller
            # A container that is shown its path on the machine finds its own group at the root.
            own = PurePosixPath(path.lstrip("/"))
            for group in (own, *own.parents):
                free = _left_by(root / group, *names)
                if free is not None:
                    yield free


def _left_by(group: Path, limit: str, use: str, cache: str) -> int | None:
    bound, used = _number(group / limit), _number(group / use)
    if bound is None or used is None:
        return None
    return bound - used + (_counter(group / "memory.stat", cache) or 0)


def _number(path: Path) -> int | None:
    """What a file holds; None for `max`, and where there is none."""
    text = " ".join(_lines(path))
    return int(text) if text.isdecimal() else None


def _counter(path: Path, name: str) -> int | None:
    """The number behind a name at the beginning of a line."""
    for line in _lines(path):
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
