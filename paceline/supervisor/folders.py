"""Folders of processes: the one they work in, and one for this user alone."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def working_folder() -> str | None:
    """Ours now; None if it was removed."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return None


def make_private(folder: Path) -> None:
    """Unless it is there. Raises OSError, also where it is somebody else's: they could put a socket of their
    own in the place of ours."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise PermissionError(errno.EPERM, f"{folder} is somebody else's")
