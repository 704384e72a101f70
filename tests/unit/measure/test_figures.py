"""Figures of artificial measurements, against computations by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from paceline.decoding import theory
from paceline.measure.figures import DrafterCost, measured_row
from paceline.measure.measuring import Positions, StepTimes
from paceline.measure.record import MeasureRecord
from paceline.measure.table import print_measures


def test_c_is_the_median_ratio_of_turns() -> None:
    times = StepTimes()
    times.add([None, 0.010, 0.030], [None, 0.002, 0.002])
    times.add([0.010, 0.010], [0.001, 0.001])
    times.add([0.050], [0.050])
    times.add([None], [None])  # a turn of nothing but a prompt
    cost = DrafterCost.of(times, 0.5, 0.25)
    assert cost.c.median == pytest.approx(0.1)
    assert (cost.c.q1, cost.c.q3) == (pytest.approx(0.1), pytest.approx(0.55))
    assert (cost.c_hat, cost.m) == (0.5, 0.25)


def test_rows_are_means_over_positions(record: MeasureRecord) -> None:
    both, code, prose = record.rows
    assert [row.kind for row in record.rows] == ["all", "code", "prose"]
    assert (both.texts, both.positions, code.positions) == (2, 800, 400)
    assert (both.alpha, code.alpha, prose.alpha) == (
        pytest.approx(0.6),
        pytest.approx(0.8),
        pytest.approx(0.4),
    )
    assert both.d_lk == pytest.approx(0.4)
    assert both.coupled == pytest.approx(0.54)
    assert both.alpha_error == pytest.approx(0.2)  # of two texts: half of their difference
    assert code.alpha_error is None
    assert code.autocorrelation == (None,) * 8
    assert both.autocorrelation[0] == pytest.approx(1)


def test_predictions_follow_the_theory(record: MeasureRecord) -> None:
    code = record.rows[1]
    ratio, coupled = code.predictions["rejection"], code.predictions["coupled"]
    assert ratio.plan.k == ratio.plan.best_k == theory.best_k(0.8, 0.1, 16)
    assert ratio.speedup == pytest.approx(theory.speedup(0.8, 0.1, ratio.plan.k))
    assert coupled.plan.alpha == pytest.approx(0.72)
    row = ratio.plan.rows[4]
    assert row.operations == pytest.approx(theory.operations_factor(0.8, 0.15, 4))
    assert row.memory == pytest.approx(theory.memory_factor(0.8, 0.2, 4))
    assert ratio.plan.least_improvement == pytest.approx(1.8 / 1.1)
    assert ratio.plan.oracle_bound_with_c == pytest.approx(1 / 0.28)
    assert ratio.tokens_per_round[0] == 1
    assert ratio.tokens_per_round[4] == pytest.approx(theory.expected_tokens(0.8, 4), rel=0.02)


def test_dependent_positions_change_the_tokens_per_round() -> None:
    """Easy and hard stretches of the same mean: a round of K = 4 gains on easy ones what it cannot lose."""
    easy_then_hard = [1.0] * 50 + [0.0] * 50
    text = Positions("", *[easy_then_hard] * 8)
    cost = DrafterCost.of(StepTimes([1.0], [0.1]), 0.0, 0.0)
    found = measured_row("draft", "all", 0.0, [text], cost, max_k=4).predictions["rejection"]
    assert found.plan.alpha == 0.5
    rounds = 10 + 50
    assert found.tokens_per_round[4] == pytest.approx(100 / rounds)
    assert found.plan.rows[4].expected_tokens == pytest.approx(1.9375)
    best = found.plan.k
    assert found.speedup_on_texts == pytest.approx(found.tokens_per_round[best] / (1 + 0.1 * best))


def test_json_has_the_rows_with_the_tokens_of_each_k(record: MeasureRecord, tmp_path: Path) -> None:
    record.write(tmp_path / "m.json")
    written = json.loads((tmp_path / "m.json").read_text(), parse_constant=pytest.fail)
    assert written["format"] == 1
    row = written["rows"][1]
    assert (row["kind"], row["drafter"], row["alpha"]) == ("code", "org/draft", pytest.approx(0.8))
    by_k = row["predictions"]["coupled"]["rows"]
    assert [each["k"] for each in by_k] == list(range(17))
    expected = record.rows[1].predictions["coupled"].tokens_per_round
    assert [each["tokens_per_round_on_texts"] for each in by_k] == pytest.approx(list(expected))
    assert written["costs"]["org/draft"]["c"]["median"] == pytest.approx(0.1)


def test_the_tables_show_measured_and_predicted_values(
    record: MeasureRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    print_measures(record, Console(width=200, highlight=False, markup=False))
    printed = capsys.readouterr().out
    assert "10.00 ms a step; 2 texts, 800 positions" in printed
    row = next(line for line in printed.splitlines() if line.startswith("code") and "400" in line)
    assert row.split()[2:] == ["org/draft", "400", "100%", "0.800", "0.200", "0.720", "0.800"]
    assert "Speed-ups are predictions" in printed


def test_marks_are_named_shortly(record: MeasureRecord) -> None:
    (mark,) = record.marks
    assert (mark.label, mark.c) == ("draft, T = 0", pytest.approx(0.1))
    assert math.isclose(mark.alpha, 0.6)
