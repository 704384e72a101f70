"""The Makefile's environment, with programs in Python's place: made once, completed if it lacks pip."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


ROOT = Path(__file__).parents[3]
PYTHON = """#!__EXECUTABLE__
import shutil, sys
from pathlib import Path
VERSION, WHOLE = __WHAT__
words = sys.argv[1:]
if words[0] == "-c":
    sys.version_info = VERSION
    sys.modules["pip"] = object() if WHOLE else None
    exec(words[1])
elif words[0] == "install":
    (Path(__file__).parent / "installed").touch()
else:
    assert words[:2] == ["-m", "venv"]
    folder = Path(words[-1])
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    (folder / "pyvenv.cfg").touch()
    for name in ("python", "pip") if WHOLE else ("python",):
        if not (folder / "bin" / name).exists():
            shutil.copy(__file__, folder / "bin" / name)
    sys.exit(not WHOLE)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    return tmp_path


def python(folder: Path, version: tuple[int, int], *, whole: bool = True) -> Path:
    """A program that says it is of this version; `whole`: its environments have pip."""
    path = folder / f"python{version[0]}.{version[1]}{'' if whole else '-without-ensurepip'}"
    said = {"__EXECUTABLE__": sys.executable, "__WHAT__": repr(((*version, 0), whole))}
    path.write_text(re.sub("__[A-Z]+__", lambda mark: said[mark[0]], PYTHON))
    path.chmod(0o755)
    return path


def make(folder: Path, program: Path | str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    words = ["make", f"VENV={folder}/venv", f"PYTHON={program}", f"{folder}/venv/.installed"]
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def installed(folder: Path) -> bool:
    return (folder / "venv/bin/installed").exists() and (folder / "venv/.installed").exists()


def test_an_environment_is_made_and_then_used(folder: Path) -> None:
    assert make(folder, python(folder, (3, 11))).returncode == 0
    assert installed(folder)
    (folder / "venv/.installed").unlink()
    assert make(folder, "/no/such/python").returncode == 0


def test_an_environment_without_pip_is_completed(folder: Path) -> None:
    """As `venv` leaves it where ensurepip is missing, which may be installed then. What is in it stays."""
    failed = make(folder, python(folder, (3, 12), whole=False))
    assert failed.returncode != 0
    mine = folder / "venv/mine"
    mine.touch()
    assert make(folder, python(folder, (3, 12))).returncode == 0
    assert installed(folder)
    assert mine.exists()


def test_an_environment_of_an_old_python_is_left_alone(folder: Path) -> None:
    old = python(folder, (3, 10))
    subprocess.run([old, "-m", "venv", folder / "venv"], check=True)
    refused = make(folder, python(folder, (3, 12)))
    assert refused.returncode != 0
    assert "older than 3.11" in refused.stderr
    assert not installed(folder)
    assert (folder / "venv/bin/pip").exists()


def test_an_old_python_is_refused_and_makes_nothing(folder: Path) -> None:
    refused = make(folder, python(folder, (3, 10)))
    assert refused.returncode != 0
    assert "Python 3.11 or newer is needed: make PYTHON=" in refused.stderr
    assert not (folder / "venv").exists()


def test_a_folder_that_is_no_environment_is_kept(folder: Path) -> None:
    mine = folder / "venv/mine"
    mine.parent.mkdir()
    mine.touch()
    assert make(folder, python(folder, (3, 11))).returncode == 0
    assert mine.exists()
