"""The report of a load test as JSON and as text."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline.client.server_status import Model
from paceline.core.errors import UnavailableError
from paceline.core.types import SamplingParams, SpeculationParams
from paceline.loadtest import LoadConfig, Report, print_report
from paceline.loadtest.verifying import Difference, VerifyReport


@pytest.fixture
def make_report(make_outcome: Any) -> Any:
    """Makes a report of two requests, with changes."""

    def made(**changes: Any) -> Report:
        values: dict[str, Any] = {
            "address": "host:1",
            "model": Model("some-model", 2048, 300),
            "config": LoadConfig(concurrency=2),
            "sampling": SamplingParams(seed=3),
            "speculation": SpeculationParams(),
            "begun": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
            "outcomes": [make_outcome(), make_outcome(1)],
            "unsent": 0,
            "stopped": False,
            "seconds": 2.0,
            "client_cpu": 0.1,
            "verification": None,
        } | changes
        return Report(**values)

    return made


def printed(report: Report) -> str:
    console = Console(file=io.StringIO(), width=160, highlight=False, markup=False)
    print_report(report, console)
    return console.file.getvalue()


def test_json_has_settings_figures_and_every_request(make_report: Any, tmp_path: Path) -> None:
    make_report().write(tmp_path / "run.json")
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["format"] == 2
    assert record["model"] == {"id": "some-model", "max_model_len": 2048, "vocabulary_size": 300}
    assert (record["settings"]["concurrency"], record["settings"]["requests"]) == (2, 100)
    assert record["begun"] == "2026-01-02T03:04:05+00:00"
    assert record["version"]
    assert record["stopped"] is False
    assert record["sampling"]["seed"] == 3
    assert record["summary"]["completion_tokens_per_second"] == 6.0
    assert record["summary"]["latencies"]["ttft"]["median"] == pytest.approx(0.5)
    assert [request["number"] for request in record["requests"]] == [0, 1]
    assert record["requests"][0]["tpot"] == pytest.approx(0.1)
    assert record["verification"] is None


def test_json_has_the_reason_of_a_failure(make_report: Any, make_outcome: Any) -> None:
    failed = make_outcome(answer=None, error=UnavailableError("the target is gone"))
    (request,) = make_report(outcomes=[failed]).to_dict()["requests"]
    assert (request["error"], request["message"]) == ("UnavailableError", "the target is gone")
    assert (request["finish_reason"], request["prompt_tokens"]) == (None, None)


def test_the_tables_have_rates_times_and_draft_figures(make_report: Any) -> None:
    lines = [" ".join(line.split()) for line in printed(make_report()).splitlines()]
    for line in (
        "host:1, some-model: 2 at a time, in 2.0 s",
        "finished 2 (length 2)",
        "completion tokens per second 6.0",
        "time to the first token (ttft) 500.00 500.00 500.00 500.00 500.00 500.00",
        "draft acceptance rate 75%",
        "accepted to position 1, 2, ... 1.00 0.50",
        "target, ms per round 200.00",
    ):
        assert line in lines, lines


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (LoadConfig(rate=2.5), "2.5 requests per second, in"),
        (LoadConfig(rate=2.5, burstiness=0.5), "2.5 requests per second (burstiness 0.5), in"),
        (LoadConfig(rate=2.0, concurrency=3), "2 requests per second, at most 3 at a time, in"),
    ],
)
def test_the_heading_describes_the_load(make_report: Any, config: LoadConfig, says: str) -> None:
    shown = printed(make_report(config=config))
    assert says in shown
    assert "longest delay after the due time" in shown
    assert "longest delay after the due time" not in printed(make_report())


def test_resumed_streams_are_counted_once_a_request(make_report: Any, make_outcome: Any) -> None:
    shown = printed(make_report(outcomes=[make_outcome(), make_outcome(1, num_resumes=3)]))
    assert "... after resuming a broken stream 1" in " ".join(shown.split())
    assert "resuming" not in printed(make_report())


def test_goodput_is_shown_with_its_goals(make_report: Any) -> None:
    config = LoadConfig(goal_ttft=0.6, goal_e2e=3.0)
    assert "of these within ttft 0.6 s, e2e 3 s" in printed(make_report(config=config))


def test_failures_are_counted_by_name(make_report: Any, make_outcome: Any) -> None:
    outcomes = [make_outcome(i, answer=None, error=UnavailableError(f"gone {i % 7}")) for i in range(20)]
    report = make_report(outcomes=outcomes)
    assert not report.sound
    assert report.notes == [
        "latencies and rates cover finished requests only",
        *(f"UnavailableError: gone {i}" for i in range(5)),
        "and 2 other error messages",
    ]
    assert "failed, UnavailableError" in printed(report)


@pytest.mark.parametrize(
    ("verification", "sound"),
    [
        (VerifyReport(2, (), (), 0), True),
        (VerifyReport(2, (Difference(1, 5),), (), 0), False),
        (VerifyReport(1, (), ("UnavailableError: gone",), 0), False),
        (VerifyReport(1, (), (), 1), False),
    ],
)
def test_different_answers_make_a_test_unsound(
    make_report: Any, verification: VerifyReport, sound: bool
) -> None:
    report = make_report(verification=verification)
    assert report.sound is sound
    shown = printed(report)
    assert "verified by plain decoding: equal" in shown
    assert ("request 1 differs from token 5 on" in shown) is bool(verification.differences)
    assert ("UnavailableError: gone" in shown) is bool(verification.failures)
    assert ("... failed or not verified 1" in " ".join(shown.split())) is (verification.compared == 1)


def test_a_busy_load_tester_is_noted(make_report: Any) -> None:
    assert make_report().notes == []
    assert "90% of a core" in make_report(client_cpu=0.9).notes[0]


def test_a_test_stopped_early_reports_unsent_requests(make_report: Any) -> None:
    report = make_report(stopped=True, unsent=4)
    assert report.notes == ["stopped early"]
    assert "due but not sent before the end 4" in " ".join(printed(report).split())
