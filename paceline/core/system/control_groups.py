"""Control groups: the resource limits of processes and containers.

A group and each of its ancestors may have a limit (https://docs.kernel.org/admin-guide/cgroup-v2.html).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def groups_around(controller: str) -> Iterator[Path]:
    """The folders of this process's group and its ancestors, innermost first.

    The controller of version 2 is "". Some folders may not exist.
    """
    for line in lines(_OWN_GROUPS):
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(","):
            continue
        root = _GROUPS / controller
        # A container may see its path on the host, while its own group is mounted at the root.
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):
            yield root / group


def lines(path: Path) -> list[str]:
    """Lines of a kernel file; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
