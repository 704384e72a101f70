"""Measures of agreement against plain sums over the definitions, and against enumerated outcomes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch

from paceline.decoding import agreement, theory
from paceline.decoding.coupled import coupled_choice
from paceline.decoding.noise import CoupledNoise

Rows = list[list[float]]


def random_rows(seed: int, count: int = 40, size: int = 7) -> Rows:
    """Distributions with zeros, equal entries and very small ones."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        weights = [rng.choice([0.0, 1e-9, 0.5, 0.5, rng.random()]) for _ in range(size)]
        weights[rng.randrange(size)] = 1.0
        rows.append([weight / sum(weights) for weight in weights])
    return rows


P, Q = random_rows(1), random_rows(2)
P_ROWS, Q_ROWS = (torch.tensor(rows, dtype=torch.float64) for rows in (P, Q))


def test_acceptance_and_divergence_follow_their_definitions() -> None:
    betas = agreement.acceptance(P_ROWS, Q_ROWS).tolist()
    for p, q, beta in zip(P, Q, betas, strict=True):
        assert beta == pytest.approx(theory.acceptance_from(p, q))
        middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
        assert 1 - beta == pytest.approx(sum(abs(a - m) for a, m in zip(p, middle, strict=True)))


def test_coupled_terms_sum_to_the_plain_formula() -> None:
    terms = agreement.coupled_terms(P_ROWS, Q_ROWS)
    for p, q, row in zip(P, Q, terms.tolist(), strict=True):
        assert sum(row) == pytest.approx(theory.coupled_acceptance(p, q), rel=1e-12)
        for v, term in enumerate(row):
            if p[v] > 0 and q[v] > 0:
                ratios = (max(a / p[v], b / q[v]) for a, b in zip(p, q, strict=True))
                assert term == pytest.approx(1 / sum(ratios), rel=1e-9)
            else:
                assert term == 0


def test_coupled_terms_are_the_shares_of_equal_choices() -> None:
    draws = 20_000
    p, q = torch.tensor([[0.5, 0.3, 0.15, 0.05]]), torch.tensor([[0.2, 0.5, 0.1, 0.2]])
    noise = [CoupledNoise(3, position) for position in range(draws)]
    chosen = [coupled_choice(row.log().expand(draws, -1).contiguous(), noise) for row in (p, q)]
    shares = torch.bincount(chosen[0][chosen[0] == chosen[1]], minlength=4) / draws
    assert shares == pytest.approx(agreement.coupled_terms(p.double(), q.double())[0], abs=0.015)


def test_a_row_without_a_guess_is_never_accepted() -> None:
    none = torch.zeros(len(P), len(P[0]), dtype=torch.float64)
    tokens = P_ROWS.argmax(-1)
    terms = agreement.coupled_terms(P_ROWS, none)
    for measured in (
        agreement.acceptance(P_ROWS, none),
        terms.sum(-1),
        agreement.equal_argmaxes(P_ROWS, none),
        agreement.rejection_sampling_acceptance(P_ROWS, none),
        agreement.naive_acceptance(P_ROWS, none),
        agreement.accepted_given(P_ROWS, none, tokens),
        agreement.coupled_given(P_ROWS, terms, tokens),
    ):
        assert not measured.any()


def test_a_point_mass_is_accepted_as_often_as_the_target_chooses_it() -> None:
    guesses = torch.tensor([i % len(P[0]) for i in range(len(P))])
    q = torch.nn.functional.one_hot(guesses, len(P[0])).double()
    expected = [p[guess] for p, guess in zip(P, guesses.tolist(), strict=True)]
    assert agreement.acceptance(P_ROWS, q).tolist() == pytest.approx(expected)
    assert agreement.coupled_terms(P_ROWS, q).sum(-1).tolist() == pytest.approx(expected)


def test_other_rules_follow_their_definitions() -> None:
    rejection = agreement.rejection_sampling_acceptance(P_ROWS, Q_ROWS).tolist()
    naive = agreement.naive_acceptance(P_ROWS, Q_ROWS).tolist()
    equal = agreement.equal_argmaxes(P_ROWS, Q_ROWS).tolist()
    for i, (p, q) in enumerate(zip(P, Q, strict=True)):
        assert rejection[i] == pytest.approx(theory.rejection_sampling_acceptance(p, q))
        assert naive[i] == pytest.approx(theory.naive_acceptance(p, q))
        assert equal[i] == (p.index(max(p)) == q.index(max(q)))


def test_the_mean_over_tokens_of_the_text_is_the_acceptance() -> None:
    """For each row: sum over tokens of p times the acceptance given that token."""
    size = len(P[0])
    terms = agreement.coupled_terms(P_ROWS, Q_ROWS)
    by_ratio, by_coupling = torch.zeros(len(P)).double(), torch.zeros(len(P)).double()
    for token in range(size):
        tokens = torch.full((len(P),), token)
        chosen = P_ROWS[:, token]
        by_ratio += (chosen * agreement.accepted_given(P_ROWS, Q_ROWS, tokens)).nan_to_num()
        by_coupling += (chosen * agreement.coupled_given(P_ROWS, terms, tokens)).nan_to_num()
    assert by_ratio.tolist() == pytest.approx(agreement.acceptance(P_ROWS, Q_ROWS).tolist())
    assert by_coupling.tolist() == pytest.approx(terms.sum(-1).tolist())


def counted_rounds(outcomes: Sequence[bool], k: int) -> int:
    """Rounds of a text where each draft token's outcome is known."""
    place = rounds = 0
    while place < len(outcomes):
        run = next((i for i, accepted in enumerate(outcomes[place : place + k]) if not accepted), k)
        place, rounds = place + run + 1, rounds + 1
    return rounds


@pytest.mark.parametrize("k", [0, 1, 2, 3, 8])
def test_expected_rounds_equal_the_enumerated_outcomes(k: int) -> None:
    rates = [0.9, 0.2, 1.0, 0.0, 0.6, 0.7, 0.5]
    expected = 0.0
    for outcomes in itertools.product([False, True], repeat=len(rates)):
        shares = [rate if accepted else 1 - rate for rate, accepted in zip(rates, outcomes, strict=True)]
        probability = 1.0
        for share in shares:
            probability *= share
        expected += probability * counted_rounds(outcomes, k)
    assert agreement.expected_rounds(rates, k) == pytest.approx(expected)


@pytest.mark.parametrize("k", [1, 4])
def test_equal_rates_give_the_tokens_of_equation_1(k: int) -> None:
    length = 2000
    tokens = length / agreement.expected_rounds([0.7] * length, k)
    assert tokens == pytest.approx(theory.expected_tokens(0.7, k), rel=0.003)


def test_autocorrelation_follows_its_definition() -> None:
    texts = [[0.1, 0.9, 0.2, 0.8], [1.0, 0.0, 1.0]]
    values = [value for text in texts for value in text]
    mean = sum(values) / 7
    variance = sum((value - mean) ** 2 for value in values) / 7
    products = [(text[i] - mean) * (text[i + 2] - mean) for text in texts for i in range(len(text) - 2)]
    assert agreement.autocorrelation(texts, 2) == pytest.approx(sum(products) / 3 / variance)
    assert agreement.autocorrelation(texts, 0) == pytest.approx(1)
    assert agreement.autocorrelation(texts, 4) is None
    assert agreement.autocorrelation([[0.5, 0.5, 0.5]], 1) is None
