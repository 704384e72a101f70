"""Ratios and theory from cells whose numbers are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.bench.cells import Cell
from paceline.bench.config import BenchConfig
from paceline.bench.figures import BY_K, RATIOS, base_of
from paceline.bench.record import Record
from paceline.decoding import theory

MakeRecord = Callable[[list[Cell]], Record]


def without(cells: list[Cell], *names: str) -> list[Cell]:
    return [cell for cell in cells if not cell.arm.name.startswith(names)]


def test_figures_come_from_decoding_alone(record: Record) -> None:
    found = record.figures(0.0)
    assert found.alpha == pytest.approx(0.75)
    assert found.c == pytest.approx(0.1)  # 1 ms over 10 ms; with the prompts' passes it would be 0.3
    assert found.hit_rate == pytest.approx(0.75)
    assert found.hidden_draft_share == pytest.approx(0.75)
    assert found.target_step_seconds == pytest.approx(0.01)
    assert found.verification_over_step == pytest.approx(1.5)
    assert found.coordinator_and_wire_share == pytest.approx(4 / 20)


def test_theory_stands_beside_what_was_measured(record: Record) -> None:
    found = record.figures(1.0)
    assert found.predicted == pytest.approx(theory.speedup(0.75, 0.1, 4))
    assert found.predicted_with_rows == pytest.approx(theory.expected_tokens(0.75, 4) / (1.5 + 4 * 0.1))
    # A plain round takes 11 ms, one with lookahead 20: 1 of the draft, 15 of the target, 4 of the wire.
    assert found.predicted_with_costs == pytest.approx(theory.expected_tokens(0.75, 4) * 11 / 20)
    assert found.free_draft_bound == pytest.approx((1 - 0.75**5) / 0.25)
    assert found.measured == pytest.approx(2.0)
    assert found.measured_without_lookahead == pytest.approx(1.5)


def test_the_floor_is_one_reading_of_all_weights(record: Record) -> None:
    found = record.figures(0.0)
    assert found.bandwidth_floor_seconds == pytest.approx(5_000_000 * 4 / 10e9)
    assert found.target_step_over_floor == pytest.approx(5.0)


def test_ratios(record: Record, config: BenchConfig) -> None:
    found = record.ratios(0.0)
    assert tuple(found) == RATIOS
    values = {name: ratio.value for name, ratio in found.items() if ratio}
    assert values == pytest.approx(
        {
            "speculative_over_plain": 2.0,
            "whole_speculative_over_plain": 2.0,
            "lookahead_over_without": 2.0 / 1.5,
            "over_generate": 2.0 / 0.8,
            "over_assisted_generation": 2.0 / 1.25,
            "measured_over_theory": 2.0 / theory.speedup(0.75, 0.1, 4),
            "measured_over_theory_with_costs": 2.0 / (theory.expected_tokens(0.75, 4) * 11 / 20),
            "worst_over_plain": (1 + 1.4 / 4 - 0.1) / 0.98,  # of the mean of both plain arms
            "auto_over_best_fixed": 1.9 / 2.0,
            "worst_plain_over_itself": 0.96,
            "served_over_plain": 2.4,
            "served_over_generate": 2.4 / 0.8,
            "served_over_prompt_lookup": 2.4 / 1.1,
        }
    )


def test_prompts_are_in_what_is_compared_with_others_alone(
    make_record: MakeRecord, all_cells: list[Cell]
) -> None:
    """What speculation makes faster is decoding: a longer prompt makes it no worse at that."""
    for cell in all_cells:
        cell.rates = {place: min(rate, 40.0) for place, rate in cell.rates.items()}
    found = make_record(all_cells).ratios(0.0)
    values = {name: ratio.value for name, ratio in found.items() if ratio}
    assert values["speculative_over_plain"] == pytest.approx(2.0)
    assert values["lookahead_over_without"] == pytest.approx(2.0 / 1.5)
    assert values["served_over_plain"] == pytest.approx(2.4)
    assert values["whole_speculative_over_plain"] == values["over_generate"] == 1.0


def test_every_k_has_ratios_of_its_own(record: Record) -> None:
    found = record.by_k(0.0, record.figures(0.0, 2))
    assert tuple(found) == BY_K
    values = {name: ratio.value for name, ratio in found.items() if ratio}
    assert values == pytest.approx(
        {
            "without_lookahead_over_plain": 1.25,
            "speculative_over_plain": 1.6,
            "lookahead_over_without": 1.6 / 1.25,
            # A proposal of two tokens takes as long as one of four: 2 ms a token over 10 of the target.
            "measured_over_theory": 1.6 / theory.speedup(0.75, 0.2, 2),
            "measured_over_theory_with_costs": 1.6 / (theory.expected_tokens(0.75, 2) * 11 / 20),
        }
    )


def test_the_headline_is_of_the_first_k(record: Record) -> None:
    first, headline = record.by_k(1.0, record.figures(1.0, 4)), record.ratios(1.0)
    assert {name: first[name] for name in BY_K[1:]} == {name: headline[name] for name in BY_K[1:]}


def test_the_faster_kind_of_assisted_generation_is_the_one_to_beat(record: Record) -> None:
    found = record.ratios(0.0)["over_assisted_generation"]
    assert found is not None
    assert found.to == "transformers assisted generation, own schedule"


def test_the_worst_ratio_says_where_it_is(record: Record) -> None:
    worst = record.ratios(0.0)["worst_over_plain"]
    assert worst is not None
    assert worst.concurrency == 4
    assert worst.of == "as served, coupled, K=auto"


def test_many_requests_stand_beside_the_mean_of_both_plain_arms(
    make_record: MakeRecord, all_cells: list[Cell], config: BenchConfig
) -> None:
    record = make_record(all_cells)
    at_4 = {cell.arm.name: cell for cell in record.cells.at(0.0, 4)}
    base = base_of(at_4["as served, coupled, K=auto"], record.cells, config)
    assert base is not None
    assert base.rates == pytest.approx({(0, 0): 392.0, (1, 0): 196.0})
    again = base_of(at_4["plain, again"], record.cells, config)
    assert again is not None
    assert again.rates == pytest.approx({(0, 0): 400.0, (1, 0): 200.0})


def test_plain_decoding_is_one_of_the_fixed_choices(make_record: MakeRecord, all_cells: list[Cell]) -> None:
    for cell in all_cells:
        if cell.concurrency == 4 and cell.arm.k != 0:
            cell.rates = {place: rate / 2 for place, rate in cell.rates.items()}
    found = make_record(all_cells).ratios(0.0)["auto_over_best_fixed"]
    assert found is not None
    assert (found.to, found.concurrency) == ("plain", 4)


@pytest.mark.parametrize(
    ("missing", "unknown"),
    [
        (
            "transformers",
            {
                "over_generate",
                "over_assisted_generation",
                "served_over_generate",
                "served_over_prompt_lookup",
            },
        ),
        (
            "speculative",
            {"lookahead_over_without", "measured_over_theory", "measured_over_theory_with_costs"},
        ),
        ("lookahead, coupled, K=auto", {"auto_over_best_fixed"}),
        (
            "as served",
            {"worst_over_plain", "served_over_plain", "served_over_generate", "served_over_prompt_lookup"},
        ),
        (
            "plain",
            {
                "speculative_over_plain",
                "whole_speculative_over_plain",
                "worst_over_plain",
                "worst_plain_over_itself",
                "measured_over_theory",
                "measured_over_theory_with_costs",
                "served_over_plain",
            },
        ),
    ],
)
def test_what_was_not_measured_has_no_ratio(
    make_record: MakeRecord, all_cells: list[Cell], missing: str, unknown: set[str]
) -> None:
    headline = make_record(without(all_cells, missing)).headline
    assert {name for name, value in headline.items() if value is None} == unknown
    assert tuple(headline) == RATIOS
