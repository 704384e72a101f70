"""Folders of processes: the one they work in, and those for this user alone."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

if sys.platform != "win32":  # there, folders of the dead stay
    import fcntl

_PREFIX: Final = "paceline-"
_OWNER: Final = "owner"
"""A file that is locked for as long as the process lives that made its folder. The system unlocks it however
that process ends."""


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


@contextlib.contextmanager
def owned_folder(place: Path) -> Iterator[Path]:
    """A new folder in `place` that only this user may enter, and that is gone with the block.

    One whose process was killed is removed when the next one is made.
    """
    remove_abandoned(place)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    try:
        with _owner_of(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _owner_of(folder: Path) -> Iterator[None]:
    """The folder is ours. The file is not there before it is locked."""
    if sys.platform == "win32":
        yield
        return
    unlocked = folder / f"{_OWNER}.new"
    with unlocked.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        unlocked.rename(folder / _OWNER)
        yield


def remove_abandoned(place: Path) -> None:
    """Remove this user's folders in `place` whose processes are dead. What cannot be removed stays."""
    if sys.platform == "win32":
        return
    for owner in place.glob(f"{_PREFIX}*/{_OWNER}"):
        with contextlib.suppress(OSError):
            _remove_if_abandoned(owner)


def _remove_if_abandoned(owner: Path) -> None:
    """Raises OSError where it is not ours, or its process lives."""
    folder = owner.parent
    # Whoever shares the place may have made others, and links that lead elsewhere.
    if folder.is_symlink() or folder.lstat().st_uid != os.getuid():
        return
    descriptor = os.open(owner, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
