"""`paceline certificates`, in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.certificates import make_certificates
from paceline.cli import app as cli
from paceline.core.errors import InvalidArgumentError
from paceline.core.security.tls import Tls
from paceline.rpc.security.credentials import check_files


def run(*words: str) -> int | str | None:
    with pytest.raises(SystemExit) as end:
        cli.main(["certificates", *words])
    return end.value.code


def test_every_role_gets_usable_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "files"
    assert not run(str(folder), "--host", "gpu-b")
    told = [line.split() for line in capsys.readouterr().out.splitlines()]
    roles = ["coordinator", "target", "draft", "client"]
    assert told == [[str(folder / f"{role}.pem"), role] for role in roles]
    for role in roles:
        files = Tls(
            certificate=str(folder / f"{role}.pem"),
            key=str(folder / f"{role}.key"),
            ca=str(folder / "ca.pem"),
        )
        check_files(files)


def test_without_cryptography_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "paceline.certificates", raising=False)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert run(str(tmp_path / "files")) == 1
    assert capsys.readouterr().err == (
        "error: this command requires the module cryptography: install paceline[certificates]\n"
    )
    assert not (tmp_path / "files").exists()


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"roles": ["boss"]}, "role"),
        ({"name": "x"}, "name"),
        ({"roles": ["target"], "name": "../x"}, "name"),
        ({"roles": ["target"], "name": "ca"}, "name"),
        ({"days": 0}, "days"),
        ({"days": 10**6}, "days"),
    ],
)
def test_invalid_arguments_are_refused_by_field(
    tmp_path: Path, arguments: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        make_certificates(tmp_path / "files", **arguments)  # type: ignore[arg-type]
    assert refusal.value.field == field
    assert not (tmp_path / "files").exists()
