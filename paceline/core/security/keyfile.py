"""The file of API keys on disk: read as a whole, replaced as a whole."""

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
    """In one step, so that a server never reads half a file. Readable and writable by its owner only, who is
    the one before where there was a file and we may say so.

    Raises InvalidArgumentError naming `api_keys` where it cannot be written; the file is as it was then.
    """
    try:
        _replace(file, render(ring))
    except OSError as error:
        raise InvalidArgumentError(
            "api_keys", f"{file} cannot be written: {error.strerror}; nothing has changed"
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
                # A server that runs as somebody else must still be able to read what root has changed.
                before = file.stat()
                with contextlib.suppress(PermissionError):
                    os.fchown(stream.fileno(), before.st_uid, before.st_gid)
        new.replace(file)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
