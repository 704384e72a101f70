"""Files named by options are read up to a bound."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.refusals import refused

from coordinator.api import chat_template
from paceline.cli.structuring import Structure
from paceline.core.errors import InvalidArgumentError
from paceline.core.security.keyfile import read_keys
from paceline.core.security.secret import read_secret
from paceline.core.security.tls import Tls
from paceline.core.system import small_files
from paceline.core.system.small_files import read_bytes, read_text
from paceline.core.types import SamplingParams
from paceline.rpc.security.credentials import check_files


def test_text_has_plain_line_ends(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes("é\r\nb\rc\n".encode())
    assert read_text("name", file) == "é\nb\nc\n"
    assert read_bytes("name", file) == file.read_bytes()


@pytest.mark.parametrize(
    ("content", "message"), [(b"\xff", "is not UTF-8"), (None, "cannot be read: No such file or directory")]
)
def test_unreadable_text_is_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidArgumentError) as refusal:
        read_text("name", file)
    assert refusal.value.message == f"name: {file} {message}"


def test_an_endless_device_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="name: /dev/zero is larger than 16 MiB"):
        read_bytes("name", "/dev/zero")


@pytest.mark.parametrize(
    ("field", "read"),
    [
        ("api_keys", read_keys),
        ("worker_secret_file", lambda file: read_secret(str(file))),
        ("chat_template", lambda file: chat_template.load("embedded:target", str(file))),
        ("json_schema", lambda file: Structure(json_schema=file).of(SamplingParams())),
        ("grammar", lambda file: Structure(grammar=file).of(SamplingParams())),
        ("tls_ca", lambda file: check_files(Tls(ca=str(file)))),
    ],
)
def test_a_too_long_file_is_refused_by_option(
    field: str, read: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_files, "MAX_BYTES", 100)
    file = tmp_path / "file"
    file.write_text("0" * 101)
    with refused(field, "is larger than"):
        read(file)
