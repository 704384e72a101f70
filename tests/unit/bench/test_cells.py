"""Medians, pairs and sums."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.bench.arms import Arm
from paceline.bench.cells import Cell, Counts, Spread, decode_ratio, pooled, ratio
from paceline.bench.processor import PROCESSES
from paceline.client import RoundTimings
from paceline.client import TokenOrigin as T


def result() -> Any:
    """What is counted of a request: 4 rounds, 3 with a proposal of 2, of which 1, 2 and 0 were accepted."""
    return SimpleNamespace(
        token_ids=(1, 2, 3, 4, 5, 6, 7),
        origins=(T.TARGET, T.ACCEPTED, T.CORRECTION, T.ACCEPTED, T.ACCEPTED, T.BONUS, T.CORRECTION),
        speculative_decoding=SimpleNamespace(
            acceptance_histogram=(1, 1, 1),
            num_spec_steps=3,
            num_draft_tokens=6,
            num_accepted_draft_tokens=3,
            num_rounds=4,
            num_lookahead_hits=2,
            num_prompt_lookups=1,
        ),
        timings=RoundTimings(draft=0.3, target=0.4, queue=0.1, wire=0.15, coordinator=0.05, total=1.0),
    )


def test_a_spread_has_the_median_between_its_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(3.0, 2.0, 4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


def test_ratios_are_of_runs_that_did_the_same_work() -> None:
    fast = Cell(Arm("a"), 0.0, 1, rates={(0, 0): 20.0, (0, 1): 300.0, (1, 0): 4.0})
    slow = Cell(Arm("b"), 0.0, 1, rates={(0, 0): 10.0, (0, 1): 100.0, (1, 0): 1.0, (1, 1): 7.0})
    # The ratio of the medians would be 20 / 8.5.
    assert ratio(fast, slow) == Spread(3.0, 2.5, 3.5)


def test_arms_that_do_the_same_are_one_with_their_mean_rates() -> None:
    one = Cell(Arm("a"), 0.0, 4, rates={(0, 0): 20.0, (1, 0): 4.0, (2, 0): 1.0})
    two = Cell(Arm("b"), 0.0, 4, rates={(0, 0): 10.0, (1, 0): 6.0})
    assert pooled([one, two]).rates == {(0, 0): 15.0, (1, 0): 5.0}
    assert pooled([one, two]).arm == Arm("a")
    assert one.rates[0, 0] == 20.0


def test_decoding_is_compared_only_where_it_was_measured() -> None:
    ours = Cell(Arm("a", 0), 0.0, 1, rates={(0, 0): 20.0}, decode_rates={(0, 0): 30.0})
    assert decode_ratio(ours, ours) == Spread(1.0, 1.0, 1.0)
    assert decode_ratio(ours, Cell(Arm("b"), 0.0, 1, rates={(0, 0): 20.0})) is None


def test_counts_are_sums_over_requests() -> None:
    counts = Counts()
    for _ in range(3):
        counts.add(result())
    assert (counts.requests, counts.completion_tokens, counts.num_rounds) == (3, 21, 12)
    assert counts.acceptance_rate == pytest.approx(0.5)
    assert counts.alpha == pytest.approx(3 / 5)
    assert counts.mean_acceptance_length == pytest.approx(2.0)
    assert counts.hit_rate == pytest.approx(2 / 3)
    assert counts.num_prompt_lookups == 3
    assert counts.draft_seconds_per_token == pytest.approx(0.05)
    assert counts.target_seconds_per_round == pytest.approx(0.1)
    assert counts.coordinator_and_wire_share == pytest.approx(0.2)
    assert sum(counts.parts.values()) == pytest.approx(counts.total / counts.num_rounds)


def test_mean_acceptance_length_is_of_committed_tokens() -> None:
    """An answer that ends with an accepted token has no correction or bonus behind it."""
    counts, ended = Counts(), result()
    ended.token_ids, ended.origins = ended.token_ids[:5], ended.origins[:5]
    counts.add(ended)
    assert counts.mean_acceptance_length == pytest.approx(1 + (5 - 4) / 3)


def test_without_drafts_there_are_no_rates() -> None:
    counts = Counts(requests=1, num_rounds=3, target=0.3, total=0.3)
    assert counts.acceptance_rate is counts.hit_rate is counts.draft_seconds_per_token is None
    assert counts.alpha is None
    assert counts.mean_acceptance_length == 1


def test_what_the_prompt_costs_is_not_decoding() -> None:
    cell = Cell(Arm("plain", 0), 0.0, 1)
    cell.counts = Counts(requests=1, completion_tokens=40, num_rounds=40, target=0.5 + 0.40)
    cell.opening = Counts(requests=1, completion_tokens=4, num_rounds=4, target=0.5 + 0.04)
    assert cell.decoding.target_seconds_per_round == pytest.approx(0.01)


def test_a_round_brings_no_more_than_its_draft_tokens_and_one() -> None:
    """Once: the opening's last round, which its end cut short, left its other tokens to the rounds behind."""
    cell = Cell(Arm("speculative", 4), 0.0, 1)
    cell.counts = Counts(requests=1, completion_tokens=11, num_rounds=3)
    cell.opening = Counts(requests=1, completion_tokens=4, num_rounds=2)
    assert cell.tokens_per_round == 5.0


def test_drafting_a_round_is_that_of_its_draft_tokens() -> None:
    """Once: what the opening's last round had no room for was drafted, as it were, in other rounds."""
    cell = Cell(Arm("speculative", 4), 0.0, 1)
    cell.counts = Counts(requests=1, num_rounds=3, num_draft_tokens=8, draft=0.5 + 0.08, target=0.3)
    cell.opening = Counts(requests=1, num_rounds=2, num_draft_tokens=2, draft=0.5 + 0.02, target=0.2)
    assert cell.seconds_per_round["draft"] == pytest.approx(0.04)
    assert cell.seconds_per_round["target"] == pytest.approx(0.1)


def test_all_rounds_are_meant_where_no_opening_was_measured() -> None:
    cell = Cell(Arm("speculative", 4), 0.0, 8)
    cell.counts = Counts(requests=2, completion_tokens=12, num_rounds=6, num_draft_tokens=16, draft=0.6)
    assert cell.seconds_per_round["draft"] == pytest.approx(0.1)
    assert cell.tokens_per_round == 10 / 4
    assert Cell(Arm("plain", 0), 0.0, 1).tokens_per_round is None


def test_processor_time_is_told_only_where_every_run_was_measured() -> None:
    """A worker that was started anew counts from zero."""
    cell = Cell(Arm("plain", 0), 0.0, 4, rates={(0, 0): 10.0, (1, 0): 9.0})
    cell.counts = Counts(completion_tokens=40)
    clocks = dict.fromkeys(PROCESSES, 1.0)
    cell.took((0, 0), clocks, clocks | {"target": 1.2})
    assert cell.processor_seconds_per_token == {}
    cell.took((1, 0), clocks, {})
    assert cell.processor_seconds_per_token == {}
    cell.took((1, 0), clocks, clocks | {"target": 1.4, "client": 1.1})
    assert cell.processor_seconds_per_token == pytest.approx(
        {"target": 0.015, "draft": 0, "coordinator": 0, "client": 0.0025}
    )
