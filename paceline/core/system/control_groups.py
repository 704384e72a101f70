"""Control groups, by which the system bounds what processes take, a container's among them.

Each group may have a limit of its own, and those around it too
(https://docs.kernel.org/admin-guide/cgroup-v2.html).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def groups_around(controller: str) -> Iterator[Path]:
    """The folders of this process's group and of those around it, the innermost first.

    Version 2 does not name controllers: its groups are those of "". Not every folder need be there.
    """
    for line in lines(_OWN_GROUPS):
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(","):
            continue
        root = _GROUPS / controller
        # A container that is shown its path on the machine finds its own group at the root.
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):
            yield root / group


def lines(path: Path) -> list[str]:
    """Of a file that the kernel writes; none where it does not."""
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
