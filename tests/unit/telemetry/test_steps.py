"""Steps of a start are log lines, and are found among others."""

from __future__ import annotations

import io
from typing import Any

import pytest

from paceline.supervisor import steps_to
from paceline.telemetry.logs import configure_logging
from paceline.telemetry.steps import step, step_in


def test_a_step_is_found_in_its_log_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_LOG_LEVEL", raising=False)
    stream = io.StringIO()
    configure_logging("target", stream=stream)
    step("making a cache of %d blocks", 7)
    (line,) = stream.getvalue().splitlines()
    assert step_in(f"[target] {line}") == "target: making a cache of 7 blocks"


@pytest.mark.parametrize(
    "line",
    [
        "[target] 2026-01-01 00:00:00,000 target INFO paceline.engine.loading.build: ready",
        "[draft] Loading weights: 100%",
        "paceline.steps: no",
        "",
    ],
)
def test_other_lines_are_not_steps(line: str) -> None:
    told: list[Any] = []
    steps_to(told.append)(line)
    assert told == []


def test_steps_are_forwarded() -> None:
    told: list[str] = []
    steps_to(told.append)("[draft] 2026-01-01 00:00:00,000 draft INFO paceline.steps: loading m")
    assert told == ["draft: loading m"]
