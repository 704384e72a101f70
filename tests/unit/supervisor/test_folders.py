"""Temporary folders are removed with their process, or when the next one is made."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.supervisor.folders import owned_folder, remove_abandoned

pytestmark = pytest.mark.slow


HANG = 30.0
OWNER = """
import signal, sys
from pathlib import Path
from paceline.supervisor.folders import owned_folder

with owned_folder(Path(sys.argv[1])) as folder:
    (folder / "1.sock").touch()
    print(folder, flush=True)
    signal.pause()
"""


def killed_owner(place: Path) -> Path:
    """A folder whose process was killed."""
    command = [sys.executable, "-P", "-c", OWNER, str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            folder = Path(process.stdout.readline().strip())
            remove_abandoned(place)
            assert (folder / "1.sock").exists(), "its process lives"
        finally:
            process.send_signal(signal.SIGKILL)
    assert folder.is_dir()
    return folder


def test_a_folder_is_removed_with_its_context(tmp_path: Path) -> None:
    with owned_folder(tmp_path) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        remove_abandoned(tmp_path)
        assert folder.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_processes_folder_is_removed_by_the_next(tmp_path: Path) -> None:
    folders = [killed_owner(tmp_path) for _ in range(2)]
    with owned_folder(tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]
    assert not any(each.exists() for each in folders)


def test_unknown_folders_are_kept(tmp_path: Path) -> None:
    """Folders without the owner file, other names, links and files."""
    elsewhere = tmp_path / "elsewhere"
    for name in ("paceline-new", "paceline-pipe", "other", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "paceline-new" / "owner.new").touch()
    (tmp_path / "other" / "owner").touch()
    (elsewhere / "owner").touch()
    (tmp_path / "paceline-link").symlink_to(elsewhere)
    (tmp_path / "paceline-pipe" / "file").touch()
    (tmp_path / "paceline-pipe" / "owner").symlink_to("file")
    before = sorted(tmp_path.rglob("*"))
    remove_abandoned(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_folders_of_other_users_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "paceline-theirs"
    folder.mkdir()
    (folder / "owner").touch()
    os.chown(folder, 65534, 65534)
    remove_abandoned(tmp_path)
    assert (folder / "owner").exists()
