"""Medians, ratios and sums of measured runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.bench.arms import Arm
from paceline.bench.cells import Cell, Counts, Ratio, Spread, pooled
from paceline.client import RoundTimings
from paceline.client import TokenOrigin as T


def result() -> Any:
    """What is counted of a request: 4 rounds, 3 with a proposal of 2, of which 1, 2 and 0 were accepted."""
    return SimpleNamespace(
        token_ids=(1, 2, 3, 4, 5, 6, 7),
        origins=(T.TARGET, T.ACCEPTED, T.CORRECTION, T.ACCEPTED, T.ACCEPTED, T.BONUS, T.CORRECTION),
        speculative_decoding=SimpleNamespace(
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


def test_ratios_compare_runs_of_equal_work() -> None:
    fast = Cell(Arm("a"), 0.0, 1, rates={(0, 0): 20.0, (0, 1): 300.0, (1, 0): 4.0})
    slow = Cell(Arm("b"), 0.0, 1, rates={(0, 0): 10.0, (0, 1): 100.0, (1, 0): 1.0, (1, 1): 7.0})
    # The ratio of the medians would be 20 / 8.5.
    found = Ratio.between(fast, slow)
    assert found == Ratio(3.0, 2.5, 3.5, "a", "b")
    assert found.over(2.0, "a theory") == Ratio(1.5, 1.25, 1.75, "a", "a theory")


def test_pooled_arms_have_their_mean_rates() -> None:
    one = Cell(Arm("a"), 0.0, 4, rates={(0, 0): 20.0, (1, 0): 4.0, (2, 0): 1.0})
    two = Cell(Arm("b"), 0.0, 4, rates={(0, 0): 10.0, (1, 0): 6.0})
    assert pooled([one, two]).rates == {(0, 0): 15.0, (1, 0): 5.0}
    assert pooled([one, two]).arm == Arm("a")
    assert one.rates[0, 0] == 20.0


def test_counts_are_summed_over_requests() -> None:
    counts = Counts()
    for _ in range(3):
        counts.add(result())
    assert (counts.requests, counts.completion_tokens, counts.num_rounds) == (3, 21, 12)
    assert counts.alpha == pytest.approx(3 / 5)
    assert counts.tokens_per_round == pytest.approx(7 / 4)
    assert counts.hit_rate == pytest.approx(2 / 3)
    assert counts.num_prompt_lookups == 3
    assert counts.draft_seconds_per_token == pytest.approx(0.05)
    assert counts.coordinator_and_wire_share == pytest.approx(0.3)
    assert sum(counts.parts.values()) == pytest.approx(counts.seconds_per_round)


def test_without_drafts_there_are_no_rates() -> None:
    counts = Counts(requests=1, num_rounds=3, target=0.3, total=0.3)
    assert counts.alpha is counts.hit_rate is counts.draft_seconds_per_token is None
    assert Counts().tokens_per_round is Counts().seconds_per_round is None


def test_the_prefill_round_is_not_counted_as_decoding() -> None:
    cell = Cell(Arm("speculative", 4), 0.0, 1)
    cell.counts = Counts(requests=1, completion_tokens=11, num_rounds=3, target=0.5 + 0.04)
    cell.opening = Counts(requests=1, completion_tokens=1, num_rounds=1, target=0.5)
    assert cell.decoding.tokens_per_round == 5.0
    assert cell.decoding.parts["target"] == pytest.approx(0.02)
