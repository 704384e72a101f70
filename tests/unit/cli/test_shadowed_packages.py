"""A foreign package or folder with the name of one of ours comes first on the path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from harness.commands import python

from paceline.core.errors import UnavailableError
from paceline.core.system.own_packages import check_ours

pytestmark = pytest.mark.slow


COMMANDS = {
    "coordinator": ["coordinator", "--target", "a:1", "--tokenizer", "embedded:target"],
    "draft_worker": ["draft-worker", "--model", "embedded:draft"],
    "target_worker": ["target-worker", "--model", "embedded:target"],
}


def run(folder: Path, package: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *COMMANDS[package]]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("package", "file"),
    [*((name, f"{name}/__init__.py") for name in COMMANDS), ("coordinator", "coordinator.py")],
)
def test_a_package_in_the_working_folder_is_named(tmp_path: Path, package: str, file: str) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / file).write_text("raise SystemExit('run')")
    ended = run(tmp_path, package)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ")
    assert str(tmp_path / file.removesuffix("/__init__.py")) in line
    assert "shadows" in line


@pytest.mark.parametrize("package", COMMANDS)
def test_our_own_packages_pass(package: str) -> None:
    check_ours(package)


def test_a_missing_package_is_named() -> None:
    with pytest.raises(UnavailableError, match="not installed"):
        check_ours("no_such_package_of_ours")


def test_a_shadowing_folder_on_the_path_is_found(tmp_path: Path) -> None:
    (tmp_path / "coordinator").mkdir()
    (tmp_path / "coordinator/__init__.py").touch()
    script = "from paceline.core.system.own_packages import check_ours; check_ours('coordinator')"
    said = f"{tmp_path / 'coordinator'} shadows Paceline's package coordinator"
    assert said in python(script, PYTHONPATH=str(tmp_path)).stderr
