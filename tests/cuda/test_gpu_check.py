"""The script for a card: it runs without the suite's packages and models, and a failure costs one row."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.decoding import noise as noise_of_paceline
from tools.gpu_check.__main__ import main
from tools.gpu_check.checks import CHECKS, faults, noise
from tools.gpu_check.device import opened
from tools.gpu_check.report import (
    FORMAT,
    JSON_NAME,
    NO_CARD,
    TABLE_NAME,
    Failed,
    Figures,
    Report,
    Row,
    Skipped,
)
from tools.gpu_check.running import Bench, Case, Check, Run
from tools.gpu_check.sizes import PRETENDED

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "tools" / "gpu_check" / "sample"
BLOCKED = """
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec

NOT_THERE = {"pytest", "hypothesis", "xdist", "openai", "starlette", "uvicorn", "pydantic",
             "prometheus_client", "opentelemetry", "grpc_health", "grpc_reflection", "coordinator",
             "harness", "tests.unit", "tests.conftest"}

class Blocked(MetaPathFinder):
    '''Who only asks whether they are there is told yes: torch asks so for some, and uses none.'''

    def find_spec(self, name, path=None, target=None):
        if {name, name.partition(".")[0]} & NOT_THERE:
            return ModuleSpec(name, self)

    def create_module(self, spec):
        raise ModuleNotFoundError(f"No module named {spec.name!r}", name=spec.name)

    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Blocked())
from paceline import assets
assets.path = assets.resolve = None
from tools.gpu_check.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
"""A bare machine: few packages, and no embedded models."""


def run_bare(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKED, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)


def told(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / JSON_NAME).read_text())
    return report


@pytest.mark.slow
def test_a_bare_machine_runs_checks(tmp_path: Path) -> None:
    only = ("machine", "noise", "steps of the small model", "chains")
    done = run_bare(
        "--pretend", "--out", str(tmp_path), *(word for name in only for word in ("--only", name))
    )
    report = told(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert report["finished"]
    assert {row["check"] for row in report["rows"]} == set(only)
    assert NO_CARD in (tmp_path / TABLE_NAME).read_text()


@pytest.mark.slow
def test_without_a_card_nothing_runs(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = run_bare("--out", str(tmp_path))
    assert done.returncode == 2
    assert "finds no CUDA device; --pretend runs" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_checks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert [line.partition(": ")[0] for line in capsys.readouterr().out.splitlines()] == [
        c.name for c in CHECKS
    ]


def test_an_unknown_check_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "speed"]) == 2
    assert "--only: speed: there are machine, " in capsys.readouterr().err


@pytest.fixture
def bench() -> Iterator[Bench]:
    with opened(pretend=True) as device:
        yield Bench(device, PRETENDED)


def rows_of(bench: Bench, checks: list[Check], out: Path, minutes: float = 1.0) -> list[Row]:
    report = Report({"device": "pretended"}, pretended=True)
    Run(report, out, minutes).run(checks, bench)
    assert told(out)["rows"] == [json.loads(json.dumps(vars_of(row))) for row in report.rows]
    return report.rows


def vars_of(row: Row) -> dict[str, Any]:
    return {f.name: getattr(row, f.name) for f in fields(row)}


def failing(*_: Any) -> Figures:
    raise ValueError("planted")


def wrong() -> Figures:
    raise Failed("is wrong", {"found": 3})


def without_meaning() -> Figures:
    raise Skipped("has no meaning")


def never() -> Figures:
    while True:
        time.monotonic()


def sound() -> Figures:
    return {"number": 1}


def cases(bench: Bench) -> Iterator[Case]:
    yield from (("fails", failing), ("wrong", wrong), ("without meaning", without_meaning), ("sound", sound))


def broken(bench: Bench) -> Iterator[Case]:
    yield "sound", sound
    failing()


def endless(bench: Bench) -> Iterator[Case]:
    yield from (("never", never), ("later", sound))


def test_a_failure_costs_its_row(bench: Bench, tmp_path: Path) -> None:
    rows = rows_of(
        bench, [Check("one", "", cases), Check("two", "", broken), Check("three", "", cases)], tmp_path
    )
    assert [(row.check, row.case, row.status) for row in rows] == [
        ("one", "fails", "failed"),
        ("one", "wrong", "failed"),
        ("one", "without meaning", "skipped"),
        ("one", "sound", "ok"),
        ("two", "sound", "ok"),
        ("two", "preparation", "failed"),
        *(("three", row.case, row.status) for row in rows[:4]),
    ]
    assert rows[0].reason.startswith("ValueError: planted\n")
    assert rows[0].reason.endswith("in failing")
    assert (rows[1].reason, rows[1].figures) == ("is wrong", {"found": 3})
    assert rows[2].reason == "has no meaning"


def test_a_check_ends_at_its_limit(bench: Bench, tmp_path: Path) -> None:
    rows = rows_of(bench, [Check("one", "", endless, minutes=0.005), Check("two", "", cases)], tmp_path)
    assert [(row.case, row.status) for row in rows[:2]] == [("never", "failed"), ("later", "skipped")]
    assert rows[0].reason.startswith("TimeLimitError: took more than")
    assert rows[1].reason == "no time was left"
    assert [row.status for row in rows[2:]] == ["failed", "failed", "skipped", "ok"]


def test_no_check_begins_after_the_overall_limit(bench: Bench, tmp_path: Path) -> None:
    rows = rows_of(bench, [Check("one", "", endless), Check("two", "", cases)], tmp_path, minutes=0.005)
    assert {row.reason for row in rows[1:]} == {"no time was left"}


@pytest.mark.planted
def test_other_bits_of_noise_fail(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = noise_of_paceline.philox4x64
    monkeypatch.setattr(noise_of_paceline, "philox4x64", lambda counter, key: inner(counter, key)[::-1])
    rows = rows_of(bench, [noise.CHECK], tmp_path)
    assert rows[0].status == "failed"
    assert rows[0].reason == "uniforms have other bits than on a CPU"


@pytest.mark.parametrize("name", faults.FAULTS)
def test_a_planted_fault_breaks_a_recording(bench: Bench, name: str) -> None:
    """What is left afterwards is the product's business; that the fault took place is the script's."""
    figures = faults.cause(bench.device, bench.sizes, name)
    assert figures["failed_recordings"] == 1


def test_the_sample_has_the_fields_of_the_code() -> None:
    sample, table = told(SAMPLE), (SAMPLE / TABLE_NAME).read_text()
    report = Report(sample["machine"], sample["pretended"], [Row(**row) for row in sample["rows"]])
    report.seconds, report.finished = sample["seconds"], sample["finished"]
    assert sample == report.to_dict()
    assert table == report.table()
    assert (sample["format"], sample["note"], sample["finished"]) == (FORMAT, NO_CARD, True)
    assert table.startswith(NO_CARD)
    assert list(dict.fromkeys(row.check for row in report.rows)) == [check.name for check in CHECKS]
    assert str(ROOT) not in json.dumps(sample)
