"""`paceline certificates`, in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from harness.commands import Done, command
from harness.refusals import refused

from paceline.certificates import make_certificates
from paceline.core.security.tls import Tls
from paceline.rpc.security.credentials import check_files


def test_every_role_gets_usable_files(tmp_path: Path) -> None:
    folder = str(tmp_path / "files")
    done = command("certificates", folder, "--host", "gpu-b")
    roles = ["coordinator", "target", "draft", "client"]
    told = [line.split() for line in done.stdout.splitlines()]
    assert (done.returncode, told) == (0, [[f"{folder}/{role}.pem", role] for role in roles])
    for role in roles:
        check_files(
            Tls(certificate=f"{folder}/{role}.pem", key=f"{folder}/{role}.key", ca=f"{folder}/ca.pem")
        )


def test_without_cryptography_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "paceline.certificates", raising=False)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    said = "error: this command requires the module cryptography: install paceline[certificates]\n"
    assert command("certificates", str(tmp_path / "files")) == Done(1, "", said)
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
    with refused(field):
        make_certificates(tmp_path / "files", **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "files").exists()
