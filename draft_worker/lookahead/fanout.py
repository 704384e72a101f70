"""Decides which outcomes of a verification are worth drafting for: a pure decision on counts.

An outcome is (a, t): a draft tokens accepted, then the next token t. For every a the draft ranks the possible
t, and this module decides how many of them get a branch. The likelihood of an outcome depends on three
things: the draft's margin at each token (its score minus the best other one's), the acceptance rate of tokens
with such margins, and the ranks of earlier next tokens among the draft's guesses. Every verdict updates the
rates and the ranks, which start from the figures of an average pair.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

FORGET = 0.98
MAX_RANK = 8
WORTH_DRAFTING = 0.04
"""A branch for a less likely outcome costs more, in passes that slow the verification, than it saves."""
WORTH_A_ROW = 0.1
"""The threshold if each row adds to the time of a pass and so delays branches of likelier outcomes."""
MARGINS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
"""Bounds between the classes of margins. Scores are log-probabilities and noise of that size."""
PRIOR_ACCEPTANCE = (0.42, 0.48, 0.62, 0.76, 0.88, 0.95, 0.98)
"""Prior acceptance of judged draft tokens, by margin class."""
PRIOR_TOKENS = 6.0
"""Weight of that prior, in draft tokens of a class."""
PRIOR_WEIGHT = 20.0
AFTER_REJECTION = (0.42, 0.20, 0.10, 0.06, 0.04, 0.03, 0.02, 0.02)
"""Prior rank of the target's token among the draft's guesses if the first guess was wrong."""
AFTER_ALL = (0.72, 0.12, 0.05, 0.03, 0.02, 0.01, 0.01, 0.01)
"""The same for the bonus token, for which no guess was judged."""


class RankedOutcome(NamedTuple):
    """A possible verdict: `accepted` draft tokens, then the token at `rank` of the draft's guesses."""

    likelihood: float
    accepted: int
    rank: int


@dataclass(slots=True)
class _Ranks:
    """Share of next tokens at each rank, from 0; the rest had lower ranks or none."""

    prior: Sequence[float]
    weight: float = 0.0
    counts: list[float] = field(default_factory=lambda: [0.0] * MAX_RANK)

    def observe(self, rank: int | None) -> None:
        self.weight = self.weight * FORGET + 1
        self.counts = [c * FORGET + (i == rank) for i, c in enumerate(self.counts)]

    def share(self, rank: int) -> float:
        return (self.prior[rank] * PRIOR_WEIGHT + self.counts[rank]) / (PRIOR_WEIGHT + self.weight)


@dataclass(slots=True)
class FanOut:
    """Learns from verdicts which outcomes are likely."""

    _after_rejection: _Ranks = field(default_factory=lambda: _Ranks(AFTER_REJECTION))
    _after_all: _Ranks = field(default_factory=lambda: _Ranks(AFTER_ALL))
    _tested: list[float] = field(default_factory=lambda: [0.0] * len(PRIOR_ACCEPTANCE))
    """Judged draft tokens, by margin class."""
    _accepted: list[float] = field(default_factory=lambda: [0.0] * len(PRIOR_ACCEPTANCE))

    def observe(self, num_accepted: int, margins: Sequence[float], rank: int | None) -> None:
        """Learn from a verdict on draft tokens with these margins.

        `rank` is None if the next token was not among the first guesses.
        """
        everything = num_accepted == len(margins)
        self._tested = [n * FORGET for n in self._tested]
        self._accepted = [n * FORGET for n in self._accepted]
        for i, margin in enumerate(margins[: num_accepted + 1]):
            kind = bisect_right(MARGINS, margin)
            self._tested[kind] += 1
            self._accepted[kind] += i < num_accepted
        (self._after_all if everything else self._after_rejection).observe(rank)

    def acceptance(self, margin: float) -> float:
        """Probability that a draft token of this margin is accepted, given that those before it were."""
        kind = bisect_right(MARGINS, margin)
        prior = PRIOR_ACCEPTANCE[kind] * PRIOR_TOKENS
        return (prior + self._accepted[kind]) / (PRIOR_TOKENS + self._tested[kind])

    def ranked(
        self, margins: Sequence[float], bonus: float | None = None, min_likelihood: float = WORTH_DRAFTING
    ) -> list[RankedOutcome]:
        """The sufficiently likely outcomes after draft tokens with these margins, likeliest first.

        `bonus` is the margin of the draft's guess of the next token, if it is known and the target chooses
        that token as it does the others.
        """
        # Shares of the other guesses, best first, if the draft's first one is wrong.
        others = [self._after_rejection.share(rank) for rank in range(MAX_RANK)]
        reach, outcomes = 1.0, []
        for a, margin in enumerate(margins):
            accepted = self.acceptance(margin)
            wrong = reach * (1 - accepted)
            outcomes += [RankedOutcome(wrong * share, a, rank) for rank, share in enumerate(others)]
            reach *= accepted
        k = len(margins)
        if bonus is None:
            share = self._after_all.share
            outcomes += [RankedOutcome(reach * share(rank), k, rank) for rank in range(MAX_RANK)]
        else:
            right = self.acceptance(bonus)
            wrong = reach * (1 - right)
            outcomes.append(RankedOutcome(reach * right, k, 0))
            outcomes += [RankedOutcome(wrong * share, k, rank) for rank, share in enumerate(others[:-1], 1)]
        worth = [outcome for outcome in outcomes if outcome.likelihood >= min_likelihood]
        return sorted(worth, key=lambda outcome: (-outcome.likelihood, outcome.rank, -outcome.accepted))
