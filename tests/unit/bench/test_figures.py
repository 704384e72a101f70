"""Ratios and theory from cells with known numbers."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from paceline.bench.arms import AGAIN, PLAIN
from paceline.bench.cells import Cells, Ratio
from paceline.bench.figures import base_of
from paceline.bench.record import BenchRecord
from paceline.decoding import theory


def values(found: object) -> dict[str, float]:
    """Ratios as numbers, by name."""
    fields = {name: getattr(found, name) for name in asdict(found)}  # type: ignore[call-overload]
    return {name: value.value for name, value in fields.items() if isinstance(value, Ratio)}


def test_figures_show_what_speculation_gains(record: BenchRecord) -> None:
    found, _ = record.speculation(0.0)
    assert found.k == 4
    assert values(found) == pytest.approx(
        {
            "speculative_over_plain": 2.0,
            "lookahead_over_without": 2.0 / 1.5,
            "over_generate": 2.0 / 0.8,
            "over_assisted_generation": 2.0 / 1.25,
            "measured_over_theory": 2.0 / theory.speedup(0.75, 0.1, 4),
        }
    )
    assert found.over_assisted_generation.to == "transformers assisted generation, own schedule"


def test_figures_come_from_decoding_only(record: BenchRecord) -> None:
    found, _ = record.speculation(1.0)
    assert found.alpha == pytest.approx(0.75)
    assert found.c == pytest.approx(0.1)  # 1 ms over 10 ms
    assert found.predicted == pytest.approx(theory.speedup(0.75, 0.1, 4))
    # A plain round takes 11 ms, one with lookahead 20: 1 of the draft, 15 of the target, 4 between them.
    assert found.predicted_with_costs == pytest.approx(theory.expected_tokens(0.75, 4) * 11 / 20)
    assert found.hit_rate == pytest.approx(0.75)
    assert found.verification_over_step == pytest.approx(1.5)
    assert found.coordinator_and_wire_share == pytest.approx(4 / 20)
    assert found.target_step_seconds == pytest.approx(0.01)
    assert found.bandwidth_floor_seconds == pytest.approx(5_000_000 * 4 / 10e9)


def test_only_comparisons_with_others_include_prompts(record: BenchRecord) -> None:
    """What speculation makes faster is decoding: a longer prompt makes it no worse at that."""
    for cell in record.cells.values():
        cell.rates = {place: min(rate, 40.0) for place, rate in cell.rates.items()}
    found = values(record.speculation(0.0)[0])
    assert found["speculative_over_plain"] == pytest.approx(2.0)
    assert found["lookahead_over_without"] == pytest.approx(2.0 / 1.5)
    assert found["over_generate"] == 1.0


def test_every_k_has_its_own_ratios(record: BenchRecord) -> None:
    found = record.speculation(0.0)[1]
    assert found.k == 2
    assert found.speculative_over_plain.value == pytest.approx(1.6)
    assert found.lookahead_over_without.value == pytest.approx(1.6 / 1.25)
    # A proposal of two tokens takes as long as one of four: 2 ms a token over 10 of the target.
    assert found.predicted == pytest.approx(theory.speedup(0.75, 0.2, 2))


def test_the_service_is_compared_with_plain_decoding(record: BenchRecord) -> None:
    found = {each.concurrency: each for each in record.service(0.0)}
    assert values(found[1]) == pytest.approx({"served_over_plain": 2.4, "auto_over_best_fixed": 1.9 / 2.0})
    assert found[1].plain_over_itself is None
    assert values(found[4]) == pytest.approx(
        {
            "served_over_plain": (1 + 1.4 / 4 - 0.1) / 0.98,  # of the mean of both plain arms
            "auto_over_best_fixed": (1 + 0.9 / 4 - 0.1) / (1 + 1.0 / 4 - 0.1),
            "plain_over_itself": 0.96,
        }
    )
    assert found[4].auto_over_best_fixed.to == "lookahead, K=4"


def test_plain_decoding_counts_as_a_fixed_k(record: BenchRecord) -> None:
    for cell in record.cells.values():
        if cell.concurrency == 4 and cell.arm.k != 0:
            cell.rates = {place: rate / 2 for place, rate in cell.rates.items()}
    assert record.service(0.0)[2].auto_over_best_fixed.to == "plain"


def test_concurrent_requests_use_the_mean_of_plain_arms(cells: Cells) -> None:
    assert base_of(cells, 0.0, 1) is cells[PLAIN, 0.0, 1]
    assert cells[PLAIN, 0.0, 4].rates == pytest.approx({(0, 0): 400.0, (1, 0): 200.0})
    assert cells[AGAIN, 0.0, 4].rates == pytest.approx({(0, 0): 384.0, (1, 0): 192.0})
    assert base_of(cells, 0.0, 4).rates == pytest.approx({(0, 0): 392.0, (1, 0): 196.0})


def test_unmeasured_values_have_no_figure(record: BenchRecord) -> None:
    for key in [key for key in record.cells if key[0].is_peer]:
        del record.cells[key]  # type: ignore[attr-defined]
    for cell in record.cells.values():
        cell.counts = cell.opening
    found, _ = record.speculation(0.0)
    assert set(values(found)) == {"speculative_over_plain", "lookahead_over_without"}
    assert found.alpha is found.c is found.predicted is found.predicted_with_costs is None
    assert found.coordinator_and_wire_share is None
