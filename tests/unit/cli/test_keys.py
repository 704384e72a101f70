"""What `paceline keys` takes from where."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli import main
from paceline.core.keyfile import read_keys


def add(file: Path, *words: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(["keys", "add", "alice", *words, "--api-keys", str(file)])
    assert not end.value.code


def test_limits_are_given_and_not_taken_from_the_settings_of_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: what an environment bounds its worker with became the limit of every new key."""
    monkeypatch.setenv("PACELINE_MAX_SEQUENCES", "3")
    monkeypatch.setenv("PACELINE_REQUESTS_PER_MINUTE", "4")
    add(tmp_path / "none.json")
    (alice,) = read_keys(tmp_path / "none.json").keys
    assert (alice.max_sequences, alice.requests_per_minute) == (None, None)
    add(tmp_path / "both.json", "--max-sequences", "5", "--requests-per-minute", "6")
    (alice,) = read_keys(tmp_path / "both.json").keys
    assert (alice.max_sequences, alice.requests_per_minute) == (5, 6)
