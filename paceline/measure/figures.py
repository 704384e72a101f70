"""Figures of each drafter, by kind of text and temperature, from what was measured at each position."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from paceline.bench.cells import Spread
from paceline.decoding import agreement, theory
from paceline.measure.measuring import Observations, Positions, StepTimes
from paceline.plan import Plan, make_plan

ALL_KINDS: Final = "all"
LAGS: Final = 8
"""Largest distance of the autocorrelation, in positions."""


@dataclass(frozen=True, slots=True)
class DrafterCost:
    """What a drafter's step costs, over a step of the target."""

    c: Spread
    """Time, over turns of the same tokens: c of definition 3.7."""
    c_hat: float
    """Arithmetic operations, by multiplied parameters: definition 3.10. Attention is left out."""
    m: float
    """Bytes of weights."""

    @classmethod
    def of(cls, times: StepTimes, c_hat: float, m: float) -> DrafterCost:
        """From at least one turn."""
        ratios = [drafter / target for drafter, target in zip(times.drafter, times.target, strict=True)]
        return cls(Spread.of(ratios), c_hat, m)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What theory predicts for one acceptance mode. Not measured."""

    plan: Plan
    """By the formulas of `paceline plan`, for the measured acceptance rate and c; K is the best K."""
    tokens_per_round: tuple[float, ...]
    """By K, from 0: tokens per round of the measured texts, without the assumption that positions are
    independent."""

    @property
    def speedup(self) -> float:
        """By theorem 3.8, at the best K."""
        return self.plan.best_speedup

    @property
    def speedup_on_texts(self) -> float:
        """The same with `tokens_per_round` in place of equation 1."""
        return self.tokens_per_round[self.plan.k] / (self.plan.k * self.plan.c + 1)


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """One drafter on one kind of text at one temperature."""

    drafter: str
    kind: str
    """`all` is all texts."""
    temperature: float
    texts: int
    positions: int
    guessed: float
    """Share of positions at which the drafter had a guess."""
    alpha: float
    """Mean of beta, the sum of min(p, q) (corollary 3.6)."""
    alpha_error: float | None
    """Standard error of alpha, from the differences between texts; None for a single text."""
    d_lk: float
    """1 - alpha (definition 3.2)."""
    coupled: float
    """Acceptance rate in coupled mode."""
    equal_argmaxes: float
    """Share of positions at which the most likely tokens of p and q are equal."""
    rejection_sampling: float
    """Acceptance rate of textbook rejection sampling (appendix A.2), for comparison."""
    naive: float
    """Acceptance rate of a rule that accepts a token if p >= q, for comparison."""
    autocorrelation: tuple[float | None, ...]
    """Of beta, at distances from 1; None where beta is constant."""
    predictions: Mapping[str, Prediction]
    """By acceptance mode: `rejection` from alpha, `coupled` from `coupled`."""


def measured_row(
    drafter: str,
    kind: str,
    temperature: float,
    texts: Sequence[Positions],
    cost: DrafterCost,
    max_k: int,
) -> MeasuredRow:
    """The figures of at least one text."""
    alpha, coupled = _mean(text.beta for text in texts), _mean(text.coupled for text in texts)
    return MeasuredRow(
        drafter=drafter,
        kind=kind,
        temperature=temperature,
        texts=len(texts),
        positions=sum(len(text.beta) for text in texts),
        guessed=_mean(text.guessed for text in texts),
        alpha=alpha,
        alpha_error=_error_of_mean([text.beta for text in texts]),
        d_lk=1 - alpha,
        coupled=coupled,
        equal_argmaxes=_mean(text.equal_argmaxes for text in texts),
        rejection_sampling=_mean(text.rejection_sampling for text in texts),
        naive=_mean(text.naive for text in texts),
        autocorrelation=tuple(
            agreement.autocorrelation([text.beta for text in texts], lag) for lag in range(1, LAGS + 1)
        ),
        predictions={
            "rejection": predicted(alpha, [text.accepted for text in texts], cost, max_k),
            "coupled": predicted(coupled, [text.accepted_coupled for text in texts], cost, max_k),
        },
    )


def predicted(alpha: float, texts: Sequence[Sequence[float]], cost: DrafterCost, max_k: int) -> Prediction:
    """The predictions for an acceptance rate, and for the acceptances given the texts."""
    rate, c = min(alpha, 1.0), cost.c.median  # a sum of probabilities may exceed 1 by rounding
    best = theory.best_k(rate, c, max_k)
    plan = make_plan(rate, c, best, max_k=max_k, c_hat=cost.c_hat, m=cost.m)
    tokens = sum(map(len, texts))
    rounds = [sum(agreement.expected_rounds(text, k) for text in texts) for k in range(max_k + 1)]
    return Prediction(plan, tuple(tokens / number for number in rounds))


def measured_rows(
    found: Observations, costs: Mapping[str, DrafterCost], kinds: Sequence[str], max_k: int
) -> list[MeasuredRow]:
    """All texts together first, then each kind; by temperature, then by drafter."""
    return [
        measured_row(drafter, kind, temperature, chosen, costs[drafter], max_k)
        for kind in (ALL_KINDS, *kinds)
        for temperature in dict.fromkeys(t for _, t in found.positions)
        for drafter in costs
        if (chosen := [t for t in found.positions[drafter, temperature] if kind in (ALL_KINDS, t.kind)])
    ]


def _mean(lists: Iterable[Sequence[float]]) -> float:
    return statistics.fmean(value for values in lists for value in values)


def _error_of_mean(texts: Sequence[Sequence[float]]) -> float | None:
    """Standard error of the mean over all positions, of texts that are independent of each other."""
    if len(texts) < 2:
        return None
    count, mean = sum(map(len, texts)), _mean(texts)
    deviations = (sum(value - mean for value in text) / count for text in texts)
    return math.sqrt(sum(d * d for d in deviations) * len(texts) / (len(texts) - 1))
