"""Ctrl-C while a command is loading ends it silently."""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from harness.commands import python

pytestmark = pytest.mark.slow


HANG = 30.0
ROOT = Path(__file__).parents[3]
STARTED = """
import signal, sys
signal.signal(signal.SIGINT, getattr(signal, sys.argv.pop(1)))
from paceline.__main__ import main
main()
"""
BLOCKS = """
import threading
print("loading", flush=True)
threading.Event().wait({seconds})
raise SystemExit(7)
"""


def interrupted(folder: Path, module: str, handler: str, seconds: str = "") -> tuple[int, str]:
    """The exit code and the errors of `paceline --version`, struck while it imports `module`."""
    (folder / f"{module}.py").write_text(BLOCKS.format(seconds=seconds))
    with subprocess.Popen(
        [sys.executable, "-P", "-c", STARTED, handler, "--version"],
        env={"PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "loading\n"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=HANG)
        finally:
            process.kill()
    return process.returncode, errors


@pytest.mark.parametrize("module", ["typer", "grpc", "rich"])
def test_ctrl_c_while_loading_prints_nothing(tmp_path: Path, module: str) -> None:
    assert interrupted(tmp_path, module, "default_int_handler") == (130, "")


def test_a_background_job_ignores_ctrl_c_while_loading(tmp_path: Path) -> None:
    """A shell starts it with SIGINT ignored."""
    assert interrupted(tmp_path, "typer", "SIG_IGN", "0.2") == (7, "")


def test_every_entry_point_installs_the_handler_first() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"paceline": "paceline.__main__:main"}


def test_importing_the_package_loads_almost_nothing() -> None:
    """These imports run before the handler is installed."""
    program = "import sys; before = set(sys.modules); import paceline; print(*set(sys.modules) - before)"
    assert set(python(program).stdout.split()) <= {"paceline", "__future__"}
