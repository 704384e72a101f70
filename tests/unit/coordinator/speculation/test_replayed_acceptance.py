"""Replayed acceptance against decoding the same text with every K."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from coordinator.speculation.expected_tokens import (
    PRIOR_RATE,
    PRIOR_TOKENS,
    DepthAcceptance,
    ReplayedAcceptance,
    expected_tokens,
)

MOST = 8


def verdicts(text: Sequence[bool], k: int) -> list[int]:
    """Accepted of each round that decodes a text of tokens that a draft gets right or not."""
    accepted, at = [], 0
    while at + k < len(text):
        right = next((i for i in range(k) if not text[at + i]), k)
        accepted.append(right)
        at += right + 1
    return accepted


def tokens_a_round(text: Sequence[bool], k: int) -> float:
    rounds = verdicts(text, k)
    return sum(rounds) / len(rounds) + 1


def after(text: Sequence[bool], k: int) -> ReplayedAcceptance:
    replay = ReplayedAcceptance(math.inf, prior_tokens=1e-9)
    replay.expected(MOST)
    for accepted in verdicts(text, k):
        replay.observe(k, accepted)
    return replay


def stretches(length: int, seed: int) -> list[bool]:
    """Easy and hard ones by turns."""
    rng = random.Random(seed)
    text: list[bool] = []
    for rate in itertools.cycle((0.97, 0.45)):
        if len(text) >= length:
            return text
        text += [rng.random() < rate for _ in range(rng.randrange(8, 30))]
    raise AssertionError


@pytest.mark.parametrize("k", range(1, MOST + 1))
def test_replayed_rounds_equal_decoding_the_text(k: int) -> None:
    """Where each token was judged, for proposals were long enough."""
    for start in itertools.product((True, False), repeat=9):
        text = [*start, False]
        judged = ReplayedAcceptance(math.inf)
        for run in "".join("+" if right else "-" for right in text)[:-1].split("-"):
            judged.observe(10, len(run))
        assert judged.rounds[k - 1] == len(verdicts(text + [False] * k, k))
        assert judged.tokens[k - 1] == len(text)


@pytest.mark.parametrize("seen", [2, 4, 8])
def test_one_k_predicts_every_k(seen: int) -> None:
    text = stretches(60_000, 1)
    expected = after(text, seen).expected(MOST)
    off = [expected[k] / tokens_a_round(text, k) for k in range(1, MOST + 1)]
    assert max(off) < 1.04
    assert min(off) > 0.98


def test_counting_by_position_mispredicts() -> None:
    """With 8 draft tokens K = 4 looks a tenth worse than it is; with 2, K = 8 looks better."""
    text = stretches(60_000, 1)
    off = {}
    for seen in (2, MOST):
        counted = DepthAcceptance(math.inf)
        for accepted in verdicts(text, seen):
            counted.observe(seen, accepted)
        made = counted.expected(MOST)
        off[seen] = [made[k] / tokens_a_round(text, k) for k in range(1, MOST + 1)]
    assert off[MOST][4 - 1] < 0.92 * off[MOST][MOST - 1]
    assert off[2][MOST - 1] > 1.05 * off[2][2 - 1]


@pytest.mark.parametrize("rate", [0.2, 0.6, 0.9])
@pytest.mark.parametrize("seen", [2, 6])
def test_independent_tokens_give_the_formula(rate: float, seen: int) -> None:
    rng = random.Random(7)
    text = [rng.random() < rate for _ in range(60_000)]
    assert after(text, seen).expected(MOST) == pytest.approx(expected_tokens([rate] * MOST), rel=0.02)


def test_new_pools_start_at_the_prior_and_children_at_the_pool() -> None:
    pool = ReplayedAcceptance(500)
    assert pool.expected(MOST) == pytest.approx(expected_tokens([PRIOR_RATE] * MOST))
    for _ in range(1000):
        pool.child(200, PRIOR_TOKENS).observe(2, 1)  # the first always, the second never
    assert pool.expected(2) == pytest.approx([1, 2, 2], abs=0.05)
    assert pool.child(40, PRIOR_TOKENS).expected(MOST) == pytest.approx(pool.expected(MOST))


def test_interleaved_sequences_are_replayed_separately() -> None:
    pool = ReplayedAcceptance(math.inf)
    pool.expected(MOST)
    good, bad = pool.child(math.inf, PRIOR_TOKENS), pool.child(math.inf, PRIOR_TOKENS)
    for _ in range(2000):
        good.observe(2, 2)
        bad.observe(2, 0)
    assert good.rounds[MOST - 1] == pytest.approx(2000 * 3 / (MOST + 1), rel=0.02)
    assert bad.rounds[MOST - 1] == 2000
    assert pool.rounds[MOST - 1] == good.rounds[MOST - 1] + bad.rounds[MOST - 1]


def test_recent_verdicts_weigh_more() -> None:
    seen = ReplayedAcceptance(20)
    for _ in range(200):
        seen.observe(1, 1)
    assert seen.expected(1)[1] > 1 + PRIOR_RATE
    for _ in range(60):
        seen.observe(1, 0)
    assert seen.expected(1)[1] < 1 + PRIOR_RATE - 0.2


def test_untried_longer_proposals_use_the_pools_rate() -> None:
    pool = ReplayedAcceptance(500)
    for _ in range(300):
        pool.child(200, PRIOR_TOKENS).observe(MOST, MOST)
    one = pool.child(200, PRIOR_TOKENS)
    for _ in range(300):
        one.observe(2, 2)
    assert one.expected(MOST)[2] > 2.9
    assert one.expected(MOST)[MOST] == pytest.approx(pool.expected(MOST)[MOST], rel=0.2)
    assert one.expected(2) == one.expected(MOST)[:3]


def test_expected_tokens_grow_with_k() -> None:
    rng = random.Random(5)
    seen = ReplayedAcceptance(12, prior_tokens=1e-3)
    for _ in range(500):
        k = rng.randrange(1, MOST + 1)
        seen.observe(k, rng.randrange(0, k + 1))
        expected = seen.expected(MOST)
        assert expected == sorted(expected)
        assert all(1 <= made <= k + 1.01 for k, made in enumerate(expected))
