"""Working folders of processes, and private folders of this user."""

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

if sys.platform != "win32":  # on Windows, abandoned folders are not removed
    import fcntl

_PREFIX: Final = "paceline-"
_OWNER: Final = "owner"
"""A file locked by the folder's creator for its lifetime. The system releases the lock however the process
ends."""


def working_folder() -> str | None:
    """The current working folder; None if it was removed."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return None


def make_private(folder: Path) -> None:
    """Create the folder unless it exists. Raises OSError, also if it belongs to another user, who could
    replace a socket in it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise PermissionError(errno.EPERM, f"{folder} belongs to another user")


@contextlib.contextmanager
def owned_folder(place: Path) -> Iterator[Path]:
    """A new folder in `place` that only this user may enter and that is removed after the block.

    A folder of a killed process is removed when the next folder is created.
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
    """Hold the lock of the folder. The file appears under its name only once it is locked."""
    if sys.platform == "win32":
        yield
        return
    unlocked = folder / f"{_OWNER}.new"
    with unlocked.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        unlocked.rename(folder / _OWNER)
        yield


def remove_abandoned(place: Path) -> None:
    """Remove this user's folders in `place` whose processes have ended, ignoring errors."""
    if sys.platform == "win32":
        return
    for owner in place.glob(f"{_PREFIX}*/{_OWNER}"):
        with contextlib.suppress(OSError):
            _remove_if_abandoned(owner)


def _remove_if_abandoned(owner: Path) -> None:
    """Raises OSError if the file cannot be opened or its process lives."""
    folder = owner.parent
    # Other users of a shared place may have created folders and links with such names.
    if folder.is_symlink() or folder.lstat().st_uid != os.getuid():
        return
    descriptor = os.open(owner, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
