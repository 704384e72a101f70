"""What `paceline serve` is asked for as a whole, before any of it is refused; and how a process leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.serving import _checked
from paceline.core.errors import InvalidArgumentError
from paceline.supervisor import StackOptions
from paceline.supervisor.processes import CAN_FORK

HANG = 30.0
PIPES: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
OPEN = {"device": "auto", "dtype": "auto", "threads": 0}


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.supervisor.stack_config.usable_cores", lambda: (0, 1))


def test_what_is_of_both_is_for_each_that_leaves_it_open() -> None:
    config = _checked(
        StackOptions(draft_device="cuda", target_threads=2), device="cpu", dtype="auto", threads=1
    )
    assert (config.target_device, config.draft_device) == ("cpu", "cuda")
    assert (config.target_threads, config.draft_threads) == (2, 1)


def test_a_draft_that_is_not_there_needs_no_core() -> None:
    options = StackOptions(draft_model="none", target_threads=2, bind_cores=True)
    config = _checked(options, **OPEN)  # type: ignore[arg-type]
    assert config.draft_model is None
    assert config.target_config.cores == (0, 1)
    with pytest.raises(InvalidArgumentError) as refused:
        _checked(StackOptions(target_threads=2, bind_cores=True), **OPEN)  # type: ignore[arg-type]
    assert refused.value.field == "bind_cores"


@pytest.mark.skipif(not CAN_FORK, reason="the system knows no pidfds")
def test_a_processor_that_is_asked_for_is_one_to_fork_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr("paceline.supervisor.stack_config._DEVICES", tmp_path)
    options = StackOptions(fork_workers=True)
    assert _checked(options, device="cpu", dtype="auto", threads=0).fork_workers
    with pytest.raises(InvalidArgumentError) as refused:
        _checked(options, **OPEN)  # type: ignore[arg-type]
    assert refused.value.field == "fork_workers"


def test_a_process_that_nobody_reads_leaves_at_once() -> None:
    """Once: what was left to write raised BrokenPipeError, and a worker ended as one that had failed."""
    leaving = "import sys; from paceline.cli.serving import _leave; sys.stdin.read(); print('more'); _leave()"
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    with subprocess.Popen([sys.executable, "-P", "-c", leaving], env=buffered, **PIPES) as process:
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
        assert process.wait(HANG) == 0
