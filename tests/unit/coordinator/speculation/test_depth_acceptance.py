"""Estimates of acceptance against counting, and E(K) against enumeration."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from coordinator.speculation.expected_tokens import (
    MAX_RATE,
    PRIOR_RATE,
    PRIOR_TOKENS,
    DepthAcceptance,
    expected_tokens,
)


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


def test_a_new_child_has_its_pools_rate() -> None:
    pool = DepthAcceptance(500)
    assert pool.rates(3) == [PRIOR_RATE] * 3
    for _ in range(1000):
        pool.observe(2, 1)  # the first always, the second never
    assert pool.rates(2) == pytest.approx([MAX_RATE, 0.0], abs=0.1)
    assert pool.child(40, PRIOR_TOKENS).rates(2) == pytest.approx(pool.rates(2))


def test_rates_count_reached_depths_only() -> None:
    rng = random.Random(3)
    seen = DepthAcceptance(math.inf)
    accepted, reached = [0, 0, 0], [0, 0, 0]
    for _ in range(400):
        num_accepted = rng.choice((0, 0, 1, 2, 3))
        seen.observe(3, num_accepted)
        for i in range(3):
            reached[i] += num_accepted >= i
            accepted[i] += num_accepted > i
    guess = PRIOR_RATE
    for i, rate in enumerate(seen.rates(3)):
        guess = (PRIOR_TOKENS * guess + accepted[i]) / (PRIOR_TOKENS + reached[i])
        assert rate == pytest.approx(guess)


def test_tokens_after_a_rejection_are_not_counted() -> None:
    seen = DepthAcceptance(40)
    seen.observe(4, 1)
    assert (seen.reached, seen.accepted) == ([1, 1, 0, 0], [1, 0, 0, 0])


def test_recent_verdicts_count_more() -> None:
    seen = DepthAcceptance(20)
    for _ in range(200):
        seen.observe(1, 1)
    assert seen.rates(1)[0] > PRIOR_RATE + 0.05
    for _ in range(60):
        seen.observe(1, 0)
    assert seen.rates(1)[0] < PRIOR_RATE - 0.2


@pytest.mark.parametrize("num_accepted", [0, 1])
def test_an_unseen_depth_takes_the_pools_rate(num_accepted: int) -> None:
    pool = DepthAcceptance(500)
    for _ in range(1000):
        pool.observe(2, random.Random(_).choice((0, 1, 2)))
    one = pool.child(40, PRIOR_TOKENS)
    for _ in range(200):
        one.observe(1, num_accepted)
    assert one.rates(2)[0] == pytest.approx(num_accepted, abs=0.6)
    assert one.rates(2)[1] == pytest.approx(pool.rates(2)[1])
