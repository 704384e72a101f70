"""The secret shared by workers and coordinators."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.refusals import refused

from paceline.core.errors import InvalidArgumentError, UnauthenticatedError
from paceline.core.security import secret as module
from paceline.core.security.secret import METADATA_KEY, VARIABLE, WorkerSecret, new_secret, read_secret

TEXT = "0123456789abcdef"


def test_every_new_secret_is_different() -> None:
    assert len({new_secret() for _ in range(10)}) == 10
    WorkerSecret(new_secret())


def test_metadata_carries_the_secret() -> None:
    secret = WorkerSecret(TEXT)
    secret.check([("user-agent", "x"), *secret.metadata])


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        ((METADATA_KEY, ""),),
        ((METADATA_KEY, TEXT[:-1]),),
        ((METADATA_KEY, TEXT + "0"),),
        ((METADATA_KEY, "é" * 16),),
        ((METADATA_KEY, b"0" * 16),),
        (("authorization", f"Bearer {TEXT}"),),
        ((METADATA_KEY, TEXT), (METADATA_KEY, TEXT)),
    ],
)
def test_wrong_metadata_is_refused(metadata: tuple[tuple[str, str | bytes], ...]) -> None:
    with pytest.raises(UnauthenticatedError) as refusal:
        WorkerSecret(TEXT).check(metadata)
    assert TEXT not in str(refusal.value)


def test_secrets_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return left == right

    monkeypatch.setattr(module.hmac, "compare_digest", compare)
    WorkerSecret(TEXT).check(WorkerSecret(TEXT).metadata)
    assert compared == [(TEXT.encode(), TEXT.encode())]


def test_repr_does_not_show_the_secret() -> None:
    assert TEXT not in repr(WorkerSecret(TEXT))


def test_derived_keys_differ_by_purpose() -> None:
    secret = WorkerSecret(TEXT)
    keys = {secret.derived("a"), secret.derived("b"), WorkerSecret(TEXT + "0").derived("a")}
    assert len(keys) == 3
    assert secret.derived("a") == WorkerSecret(TEXT).derived("a")


@pytest.mark.parametrize(
    "text", ["short", "x" * 513, "with a space 123456", "äöüäöüäöüäöüäöüäöü", "x" * 16 + "\x00"]
)
def test_an_unusable_secret_is_refused_by_name(text: str, tmp_path: Path) -> None:
    with refused(VARIABLE) as refusal:
        read_secret("", {VARIABLE: text})
    assert text not in refusal.value.message
    file = tmp_path / "secret"
    file.write_text(text, encoding="utf-8")
    with refused("worker_secret_file"):
        read_secret(str(file), {})


def test_the_file_takes_precedence_over_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{TEXT}\n")
    assert read_secret(str(file), {VARIABLE: "f" * 16}) == WorkerSecret(TEXT)
    assert read_secret("", {VARIABLE: "f" * 16}) == WorkerSecret("f" * 16)
    assert read_secret("", {VARIABLE: ""}) is None
    assert read_secret("", {}) is None


def test_a_missing_secret_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        read_secret(str(tmp_path / "none"), {VARIABLE: TEXT})
