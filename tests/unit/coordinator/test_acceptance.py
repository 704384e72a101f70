"""Estimates of acceptance against counting, and E(K) against enumeration."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from coordinator.acceptance import HIGHEST, NEWCOMER, PRIOR_WEIGHT, Acceptance, expected_tokens


@pytest.mark.parametrize("rates", [(), (0.3,), (0.9, 0.1), (0.5, 0.8, 0.2, 1.0)])
def test_expected_tokens_is_the_mean_over_all_outcomes(rates: tuple[float, ...]) -> None:
    mean = 0.0
    for flips in itertools.product((True, False), repeat=len(rates)):
        chance = math.prod(r if flip else 1 - r for r, flip in zip(rates, flips, strict=True))
        accepted = next((i for i, flip in enumerate(flips) if not flip), len(rates))
        mean += chance * (accepted + 1)
    expected = expected_tokens(rates)
    assert len(expected) == len(rates) + 1
    assert expected[0] == 1
    assert expected[-1] == pytest.approx(mean)


def test_a_new_pair_is_middling_and_a_new_sequence_is_like_its_pair() -> None:
    pair = Acceptance(500)
    assert pair.rates(3) == [NEWCOMER] * 3
    for _ in range(1000):
        pair.observe(2, 1)  # the first always, the second never
    assert pair.rates(2) == pytest.approx([HIGHEST, 0.0], abs=0.1)
    assert Acceptance(40, pair).rates(2) == pytest.approx(pair.rates(2))


def test_rates_are_counted_where_the_position_is_reached() -> None:
    rng = random.Random(3)
    seen = Acceptance(math.inf)
    accepted, reached = [0, 0, 0], [0, 0, 0]
    for _ in range(400):
        num_accepted = rng.choice((0, 0, 1, 2, 3))
        seen.observe(3, num_accepted)
        for i in range(3):
            reached[i] += num_accepted >= i
            accepted[i] += num_accepted > i
    guess = NEWCOMER
    for i, rate in enumerate(seen.rates(3)):
        guess = (PRIOR_WEIGHT * guess + accepted[i]) / (PRIOR_WEIGHT + reached[i])
        assert rate == pytest.approx(guess)


def test_tokens_after_the_first_rejected_one_were_not_looked_at() -> None:
    seen = Acceptance(40)
    seen.observe(4, 1)
    assert (seen.reached, seen.accepted) == ([1, 1, 0, 0], [1, 0, 0, 0])


def test_what_is_recent_counts_more() -> None:
    seen = Acceptance(20)
    for _ in range(200):
        seen.observe(1, 1)
    assert seen.rates(1)[0] > NEWCOMER + 0.05
    for _ in range(60):
        seen.observe(1, 0)
    assert seen.rates(1)[0] < NEWCOMER - 0.2


@pytest.mark.parametrize("num_accepted", [0, 1])
def test_a_position_that_was_not_seen_is_like_the_pairs(num_accepted: int) -> None:
    """Whatever came before it: that text which is easy goes on being easy is in what others saw there."""
    pair = Acceptance(500)
    for _ in range(1000):
        pair.observe(2, random.Random(_).choice((0, 1, 2)))
    one = Acceptance(40, pair)
    for _ in range(200):
        one.observe(1, num_accepted)
    assert one.rates(2)[0] == pytest.approx(num_accepted, abs=0.6)
    assert one.rates(2)[1] == pytest.approx(pair.rates(2)[1])


def test_faded_evidence_is_soon_outweighed() -> None:
    stubborn, faded = Acceptance(40), Acceptance(40)
    for one in (stubborn, faded):
        for _ in range(200):
            one.observe(1, 0)
    faded.fade(6.0)  # and its prior with it
    assert (faded.reached, faded.prior_weight) == ([6.0], 6.0)
    for one in (stubborn, faded):
        for _ in range(6):
            one.observe(1, 1)
    assert faded.rates(1)[0] > stubborn.rates(1)[0] + 0.1
