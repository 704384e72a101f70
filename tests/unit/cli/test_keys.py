"""`paceline keys`: limits, locking and the key file."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.commands import Done, command

from paceline.cli.commands import keys as keys_module
from paceline.core.errors import InvalidArgumentError
from paceline.core.security.keyfile import read_keys

HANG = 30.0


def test_key_limits_ignore_a_workers_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same environment variables bound a worker."""
    monkeypatch.setenv("PACELINE_MAX_SEQUENCES", "3")
    monkeypatch.setenv("PACELINE_REQUESTS_PER_MINUTE", "4")
    both = ("--max-sequences", "5", "--requests-per-minute", "6")
    for number, (words, bounds) in enumerate([((), (None, None)), (both, (5, 6))]):
        file = tmp_path / f"{number}.json"
        assert command("keys", "add", "alice", *words, "--api-keys", str(file)).returncode == 0
        (alice,) = read_keys(file).keys
        assert (alice.max_sequences, alice.requests_per_minute) == bounds


def names(file: Path) -> set[str]:
    return {key.name for key in read_keys(file).keys}


@pytest.mark.parametrize(
    ("meanwhile", "left"),
    [
        (lambda file: keys_module.add("bob", file), {"alice", "bob", "carol"}),
        (lambda file: keys_module.remove("carol", file), {"alice"}),
    ],
    ids=["add", "remove"],
)
def test_two_simultaneous_changes_both_take_effect(
    meanwhile: Callable[[Path], None], left: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second must read the file after the first has written it."""
    pytest.importorskip("fcntl")
    file = tmp_path / "keys.json"
    keys_module.add("carol", file)
    write_keys = keys_module.write_keys
    other = threading.Thread(target=meanwhile, args=(file,))

    def write_late(*what: Any) -> None:
        if threading.current_thread() is not other:
            other.start()
            other.join(0.5)  # long enough to change the file, if nothing keeps it
        write_keys(*what)

    monkeypatch.setattr(keys_module, "write_keys", write_late)
    keys_module.add("alice", file)
    other.join(HANG)
    assert names(file) == left
    assert list(tmp_path.iterdir()) == [file], "the lock is gone"


def test_a_removed_lock_does_not_admit_two(tmp_path: Path) -> None:
    """A waiting process holds the removed file, while newcomers make a new one."""
    pytest.importorskip("fcntl")
    file, inside, most = tmp_path / "keys.json", 0, 0

    def change_it_often() -> None:
        nonlocal inside, most
        for _ in range(5):
            with keys_module._exclusive_access(file):
                inside += 1
                most = max(most, inside)
                time.sleep(0.005)
                inside -= 1

    changing = [threading.Thread(target=change_it_often) for _ in range(8)]
    for each in changing:
        each.start()
    for each in changing:
        each.join(HANG)
    assert (inside, most) == (0, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_leftover_lock_file_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / ".keys.json.lock").touch()
    keys_module.add("alice", tmp_path / "keys.json")
    assert names(tmp_path / "keys.json") == {"alice"}


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^api_keys: .*{tmp_path / 'none'}"):
        keys_module.add("alice", tmp_path / "none" / "keys.json")


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_reported_and_the_file_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys.json"
    keys_module.add("bob", file)
    before = file.read_bytes()
    monkeypatch.setattr("paceline.core.security.keyfile.os.fsync", full)
    said = f"error: --api-keys: {file} cannot be written: No space left on device; nothing was changed\n"
    for words in (["add", "alice"], ["remove", "bob"]):
        assert command("keys", *words, "--api-keys", str(file)) == Done(2, "", said)
        assert file.read_bytes() == before
        assert list(tmp_path.iterdir()) == [file], "nothing is left beside it"


def test_a_key_that_could_not_be_shown_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys.json"
    keys_module.add("bob", file)
    monkeypatch.setattr("builtins.print", full)
    with pytest.raises(OSError, match="No space left"):
        keys_module.add("alice", file)
    assert names(file) == {"bob"}
