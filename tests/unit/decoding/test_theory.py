"""The paper's tables, the overview's examples, and bounds."""

from __future__ import annotations

import math
import random

import pytest

from paceline.decoding.theory import (
    acceptance_from,
    best_k,
    best_k_with_lookahead,
    coupled_acceptance,
    expected_tokens,
    improvement_possible,
    least_improvement,
    measured_alpha,
    memory_factor,
    naive_acceptance,
    operations_factor,
    oracle_bound,
    rejection_sampling_acceptance,
    speedup,
    speedup_with_lookahead,
)


@pytest.mark.parametrize(
    ("alpha", "k", "operations", "speed"),
    [
        (0.6, 2, 1.53, 1.96),
        (0.7, 3, 1.58, 2.53),
        (0.8, 2, 1.23, 2.44),
        (0.8, 5, 1.63, 3.69),
        (0.9, 2, 1.11, 2.71),
        (0.9, 10, 1.60, 6.86),
    ],
)
def test_speedups_match_table_1(alpha: float, k: int, operations: float, speed: float) -> None:
    assert round(operations_factor(alpha, 0.0, k), 2) == operations
    assert round(speedup(alpha, 0.0, k), 2) == speed


@pytest.mark.parametrize(
    ("k", "alpha", "c", "expected"),
    [
        (7, 0.75, 0.02, 3.2),
        (7, 0.8, 0.04, 3.3),
        (7, 0.82, 0.11, 2.5),
        (7, 0.62, 0.02, 2.3),
        (5, 0.68, 0.04, 2.4),
        (3, 0.71, 0.11, 2.0),
        (5, 0.65, 0.02, 2.4),
        (5, 0.73, 0.04, 2.6),
        (3, 0.74, 0.11, 2.0),
        (5, 0.53, 0.02, 1.9),
        (3, 0.55, 0.04, 1.8),
        (3, 0.56, 0.11, 1.6),
    ],
)
def test_expected_improvement_matches_table_4(k: int, alpha: float, c: float, expected: float) -> None:
    """The paper prints alpha and c with two digits, so the column is known within their rounding."""
    assert speedup(alpha, c, k) == pytest.approx(expected, abs=0.067)
    assert speedup(alpha - 0.005, c + 0.005, k) < expected + 0.05
    assert speedup(alpha + 0.005, c - 0.005, k) > expected - 0.05


def test_overview_examples_hold() -> None:
    assert round(expected_tokens(0.8, 4), 1) == 3.4
    assert round(expected_tokens(0.5, 4), 1) == 1.9


def test_expected_tokens_is_the_mean_of_a_capped_geometric() -> None:
    for alpha in (0.0, 0.3, 0.9, 1.0):
        for k in range(6):
            mean = sum((i + 1) * alpha**i * (1 - alpha if i < k else 1) for i in range(k + 1))
            assert expected_tokens(alpha, k) == pytest.approx(mean)


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("alpha", [0.3, 0.7, 0.95])
def test_measured_alpha_equals_that_of_independent_tokens(alpha: float, k: int) -> None:
    """Exactly, in expectation: a round accepts i < k and rejects one, or accepts all."""
    rejected = 1 - alpha**k
    accepted = sum(i * alpha**i * (1 - alpha) for i in range(k)) + k * alpha**k
    assert accepted / (accepted + rejected) == pytest.approx(alpha)
    assert measured_alpha(7, 3) == pytest.approx(0.7)
    assert measured_alpha(0, 0) is None


@pytest.mark.parametrize("k", [2, 4, 8])
def test_measured_alpha_equals_that_of_the_text(k: int) -> None:
    """Hard tokens come behind easy ones, so rounds often begin with an easy one: first positions say more."""
    rng = random.Random(k)
    text, easy = [], True
    for _ in range(200_000):
        easy = not easy or rng.random() < 0.7
        text.append(easy)
    accepted = rejected = first = rounds = i = 0
    while i + k < len(text):
        run = next((j for j in range(k) if not text[i + j]), k)
        accepted, rejected, first = accepted + run, rejected + (run < k), first + (run > 0)
        rounds, i = rounds + 1, i + run + 1
    of_the_text = sum(text) / len(text)
    judged = measured_alpha(accepted, rejected)
    assert judged is not None
    assert abs(judged - of_the_text) < 0.03  # what follows a proposal that is accepted whole is not judged
    assert first / rounds > of_the_text + 0.1


def test_improvement_follows_the_paper() -> None:
    assert improvement_possible(0.2, 0.1)
    assert not improvement_possible(0.1, 0.1)
    assert least_improvement(0.8, 0.1) == pytest.approx(speedup(0.8, 0.1, 1))
    assert operations_factor(0.7, 0.1, 3) == pytest.approx(0.3 * (0.3 + 4) / (1 - 0.7**4))
    assert speedup(0.8, 0.1, 4, overhead=0.2, row_cost=0.05) == pytest.approx(expected_tokens(0.8, 4) / 1.8)


def test_best_k_has_the_highest_speedup() -> None:
    for alpha in (0.1, 0.5, 0.8, 0.95):
        for c in (0.01, 0.1, 0.5):
            k = best_k(alpha, c, 64)
            assert (k > 0) == improvement_possible(alpha, c)
            if k:
                assert speedup(alpha, c, k) >= least_improvement(alpha, c) - 1e-12
                assert all(speedup(alpha, c, k) >= speedup(alpha, c, j) for j in range(1, 65))
    assert best_k(0.8, 0.05, 3) == 3
    assert best_k(0.9, 0.05, 8, overhead=20.0) == 0
    assert best_k(1.0, 0.1, 8) == 8


def test_lookahead_hides_drafting_behind_verification() -> None:
    assert speedup_with_lookahead(0.8, 0.1, 4) == pytest.approx(expected_tokens(0.8, 4))
    assert speedup_with_lookahead(0.8, 0.5, 4) == pytest.approx(expected_tokens(0.8, 4) / 2)
    assert speedup_with_lookahead(0.8, 0.1, 4, overhead=0.2, row_cost=0.1) == pytest.approx(
        expected_tokens(0.8, 4) / 1.6
    )
    for alpha in (0.1, 0.5, 0.8, 0.95):
        for c in (0.05, 0.1, 0.5, 1.5):
            best = best_k_with_lookahead(alpha, c, 32)
            gains = [speedup_with_lookahead(alpha, c, k) if k else 1.0 for k in range(33)]
            assert gains[best] == max(gains)
            assert gains[best] >= speedup(alpha, c, best_k(alpha, c, 32))


def test_memory_is_read_once_a_round() -> None:
    assert memory_factor(0.8, 0.0, 4) == pytest.approx(1 / expected_tokens(0.8, 4))
    assert memory_factor(0.5, 0.1, 2) == pytest.approx((0.1 + 0.1 + 1) / (1 + 0.5 + 0.25))


@pytest.mark.parametrize(
    ("alpha", "below", "up_to"), [(0.5, 0.94, 1.06), (0.7, 1.77, 2.06), (0.9, 3.10, 3.36)]
)
def test_accepted_tokens_of_four_follow_the_sum(alpha: float, below: float, up_to: float) -> None:
    """With the last term of the sum, all four accepted would count twice; see docs/decoding.md."""
    terms = [k * alpha**k * (1 - alpha) for k in range(5)]
    assert round(sum(terms[:4]) + 4 * alpha**4, 2) == below == round(expected_tokens(alpha, 4) - 1, 2)
    assert round(sum(terms) + 4 * alpha**4, 2) == up_to


def test_an_oracle_gains_at_most_58_percent() -> None:
    """Of the best fixed k: e / (e - 1), nearly reached for alpha near 1."""
    bound, highest = math.e / (math.e - 1), 0.0
    for alpha in (0.3, 0.6, 0.8, 0.9, 0.95, 0.99, 0.995):
        for i in range(1, 40):
            c = alpha * (i / 40) ** 3
            ratio = oracle_bound(alpha, c) / speedup(alpha, c, best_k(alpha, c, 1000))
            assert ratio < bound
            highest = max(highest, ratio)
    assert highest > 1.57


def test_an_oracles_rounds_cost_their_draft_tokens() -> None:
    """Rounds of i accepted tokens, each of which took c, by their probability."""
    alpha, c = 0.7, 0.15
    shares = [(1 - alpha) * alpha**i for i in range(400)]
    tokens = sum(share * (i + 1) for i, share in enumerate(shares))
    seconds = sum(share * (i * c + 1) for i, share in enumerate(shares))
    assert oracle_bound(alpha, c) == pytest.approx(tokens / seconds)
    assert oracle_bound(1.0, 0.25) == pytest.approx(4)


def test_oracle_bound_is_the_limit_of_expected_tokens() -> None:
    assert oracle_bound(0.75) == pytest.approx(4)
    assert oracle_bound(0.75) == pytest.approx(expected_tokens(0.75, 200))
    assert oracle_bound(1.0) == math.inf


def test_acceptance_at_one_position_follows_the_formulas() -> None:
    assert acceptance_from([0.5, 0.5, 0.0], [0.2, 0.3, 0.5]) == pytest.approx(0.5)
    generator = random.Random(0)
    for _ in range(200):
        p, q = (
            [x / sum(v) for x in v] for v in ([generator.random() ** 3 for _ in range(5)] for _ in range(2))
        )
        alpha, coupled = acceptance_from(p, q), coupled_acceptance(p, q)
        assert alpha / (2 - alpha) - 1e-12 <= coupled <= alpha + 1e-12
    assert coupled_acceptance(p, p) == pytest.approx(1)
    assert coupled_acceptance([1.0, 0.0], [0.0, 1.0]) == 0


def test_rules_for_comparison_accept_less() -> None:
    p, q = [0.5, 0.3, 0.2, 0.0], [0.2, 0.4, 0.2, 0.2]
    assert rejection_sampling_acceptance(p, q) == pytest.approx(0.4)
    assert naive_acceptance(p, q) == pytest.approx(0.2 + 0.2)
    assert max(rejection_sampling_acceptance(p, q), naive_acceptance(p, q)) < acceptance_from(p, q)
    assert rejection_sampling_acceptance([0.5, 0.5], [1.0, 0.0]) == 0


@pytest.mark.parametrize(("alpha", "k"), [(-0.1, 1), (1.1, 1), (0.5, -1), (math.nan, 1)])
def test_arguments_out_of_range_are_refused(alpha: float, k: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        expected_tokens(alpha, k)
