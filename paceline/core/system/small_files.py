"""Reading files named by options: keys, certificates, templates, schemas."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from paceline.core.errors import InvalidArgumentError

MAX_BYTES: Final = 16 * 1024 * 1024
"""Larger than any such file. Bounds the memory for an endless device such as /dev/zero."""


def read_bytes(field: str, file: str | Path) -> bytes:
    """Raises InvalidArgumentError naming `field` for a file that cannot be read or is too long."""
    try:
        with Path(file).open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise InvalidArgumentError(field, f"{file} cannot be read: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise InvalidArgumentError(field, f"{file} is larger than {MAX_BYTES // 2**20} MiB")
    return content


def read_text(field: str, file: str | Path) -> str:
    """As read_bytes, for UTF-8 text; line ends become `\\n`."""
    try:
        text = read_bytes(field, file).decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidArgumentError(field, f"{file} is not UTF-8") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")
