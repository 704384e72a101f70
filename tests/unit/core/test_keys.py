"""API keys: valid files, and the owner of a key."""

from __future__ import annotations

import hmac
import json
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.core.security.keyfile import read_keys, write_keys
from paceline.core.security.keys import ApiKey, KeyRing, digest, parse, render

ALICE = ApiKey(name="alice", sha256=digest("pl-alice"), requests_per_minute=60, max_sequences=4)
BOB = ApiKey(name="bob.2", sha256=digest("pl-bob"))
ADMIN = ApiKey(name="ops", sha256=digest("pl-ops"), admin=True)


def test_a_key_is_found_by_its_exact_text_only() -> None:
    ring = KeyRing([ALICE, BOB])
    assert ring.find("pl-alice") is ALICE
    assert ring.find("pl-bob") is BOB
    for other in ("", "pl-", "pl-bo", "pl-bobb", "PL-BOB", ALICE.sha256, "\ud800"):
        assert ring.find(other) is None
    assert KeyRing().find("pl-alice") is None


def test_every_hash_is_compared_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(a) or real(a, b))
    ring = KeyRing([ALICE, BOB])
    for token in ("pl-alice", "pl-bob", "none"):
        compared.clear()
        ring.find(token)
        assert compared == [ALICE.sha256, BOB.sha256]


def test_a_key_file_holds_hashes_and_no_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    write_keys(file, KeyRing([ALICE, BOB]))
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_keys(file).keys == (ALICE, BOB)
    assert "pl-alice" not in file.read_text()
    write_keys(file, KeyRing([BOB]))
    assert read_keys(file).keys == (BOB,)
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_changed_by_root_keeps_its_owner(tmp_path: Path) -> None:
    """A server of another user could not read it, and would keep removed keys."""
    file = tmp_path / "keys.json"
    write_keys(file, KeyRing([ALICE, BOB]))
    os.chown(file, 12345, 12346)
    write_keys(file, KeyRing([BOB]))
    after = file.stat()
    assert (after.st_uid, after.st_gid, after.st_mode & 0o777) == (12345, 12346, 0o600)


def test_unset_limits_are_not_written() -> None:
    assert json.loads(render(KeyRing([BOB]))) == {"keys": [{"name": "bob.2", "sha256": BOB.sha256}]}


def entry(**changes: Any) -> str:
    return json.dumps({"keys": [{"name": "a", "sha256": "0" * 64} | changes]})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is not JSON"),
        ("[]", "must be an object"),
        ('{"keys": {}}', "must be an object"),
        ('{"keys": [], "more": 1}', "must be an object"),
        ('{"keys": [1]}', "entry 0 must be an object"),
        ('{"keys": [{"name": "a"}]}', "entry 0: sha256: is required"),
        (entry(name=""), "entry 0: name"),
        (entry(name="a b"), "entry 0: name"),
        (entry(name="a" * 65), "entry 0: name"),
        (entry(name=3), "entry 0: name"),
        (entry(sha256="0" * 63), "entry 0: sha256"),
        (entry(sha256="G" * 64), "entry 0: sha256"),
        (entry(requests_per_minute=0), "entry 0: requests_per_minute"),
        (entry(requests_per_minute=True), "entry 0: requests_per_minute"),
        (entry(max_sequences=1.5), "entry 0: max_sequences"),
        (entry(max_sequences=10**9), "entry 0: max_sequences"),
        (entry(key="pl-secret"), "entry 0: key: unknown"),
    ],
)
def test_an_invalid_key_file_is_refused(text: str, told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=told) as failure:
        parse(text)
    assert "pl-secret" not in str(failure.value)


def test_names_and_hashes_are_unique_and_bounded() -> None:
    twin = ApiKey(name="carol", sha256=ALICE.sha256)
    for keys in ([ALICE, ALICE], [ALICE, twin]):
        with pytest.raises(InvalidArgumentError, match="two have the same"):
            KeyRing(keys)
    many = [ApiKey(name=f"k{i}", sha256=digest(str(i))) for i in range(limits.MAX_API_KEYS + 1)]
    KeyRing(many[1:])
    with pytest.raises(InvalidArgumentError, match="at most"):
        KeyRing(many)


def test_an_unreadable_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        read_keys(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(InvalidArgumentError, match="UTF-8"):
        read_keys(tmp_path / "bytes")


def test_only_an_admin_key_is_written_as_one() -> None:
    written = json.loads(render(KeyRing([ALICE, ADMIN])))["keys"]
    assert [entry.get("admin") for entry in written] == [None, True]
    assert parse(render(KeyRing([ALICE, ADMIN]))).keys == (ALICE, ADMIN)


@pytest.mark.parametrize("value", [1, "true", None])
def test_admin_is_true_or_false(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="admin: must be true or false"):
        ApiKey(name="ops", sha256=digest("pl-ops"), admin=value)
