"""Reading and atomically replacing the file of API keys."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from paceline.core.errors import InvalidArgumentError
from paceline.core.security.keys import KeyRing, parse, render
from paceline.core.system.small_files import read_text


def read_keys(file: Path) -> KeyRing:
    """Raises InvalidArgumentError naming `api_keys`."""
    return parse(read_text("api_keys", file))


def write_keys(file: Path, ring: KeyRing) -> None:
    """Replace the file atomically. Only its owner may read and write it; a replaced file keeps its owner if
    this process may set it.

    Raises InvalidArgumentError naming `api_keys` and leaves the file unchanged if it cannot be written.
    """
    try:
        _replace(file, render(ring))
    except OSError as error:
        raise InvalidArgumentError(
            "api_keys", f"{file} cannot be written: {error.strerror}; nothing was changed"
        ) from error


def _replace(file: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    new = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
            if file.exists():
                # A server under another user must still be able to read a file changed by root.
                before = file.stat()
                with contextlib.suppress(PermissionError):
                    os.fchown(stream.fileno(), before.st_uid, before.st_gid)
        new.replace(file)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
