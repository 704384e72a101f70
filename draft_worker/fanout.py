"""Which outcomes of a verification are worth drafting for: a pure decision on counts.

An outcome is (a, t): a draft tokens accepted, then the next token t. For every a the draft ranks the
possible t; this decides how many of them get a branch. How likely an outcome is follows from two
histograms that every verdict feeds: how many draft tokens were accepted, and at which rank of the draft's
guesses the next token stood. The first start from what a middling pair shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

FORGET = 0.98
MAX_RANK = 8
WORTH_DRAFTING = 0.04
"""An outcome less likely than this costs more, in passes that slow the verification, than it saves."""
PRIOR_WEIGHT = 20.0
PRIOR_ACCEPTANCE = 0.7
AFTER_REJECTION = (0.42, 0.20, 0.10, 0.06, 0.04, 0.03, 0.02, 0.02)
"""Where the target's token stands among the draft's guesses when its first guess was wrong."""
AFTER_ALL = (0.72, 0.12, 0.05, 0.03, 0.02, 0.01, 0.01, 0.01)
"""The same when nothing was guessed before: the bonus."""


class Outcome(NamedTuple):
    """What a verdict may be: `accepted` draft tokens, then the token at `rank` of the draft's guesses."""

    likelihood: float
    accepted: int
    rank: int


@dataclass(slots=True)
class _Ranks:
    """Share of next tokens at each rank, from 0; what is missing to 1 was ranked lower."""

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
    """Learns from the verdicts which outcomes the next ones are likely to have."""

    _after_rejection: _Ranks = field(default_factory=lambda: _Ranks(AFTER_REJECTION))
    _after_all: _Ranks = field(default_factory=lambda: _Ranks(AFTER_ALL))
    _tested: float = 0.0
    _accepted: float = 0.0

    def observe(self, num_accepted: int, num_draft: int, rank: int | None) -> None:
        """Learn from a verdict; `rank` None when the next token was not among the first guesses."""
        everything = num_accepted == num_draft
        self._tested = self._tested * FORGET + num_accepted + (not everything)
        self._accepted = self._accepted * FORGET + num_accepted
        (self._after_all if everything else self._after_rejection).observe(rank)

    @property
    def acceptance(self) -> float:
        """Probability that a draft token that is looked at is accepted."""
        return (PRIOR_ACCEPTANCE * PRIOR_WEIGHT + self._accepted) / (PRIOR_WEIGHT + self._tested)

    def ranked(self, num_draft: int) -> list[Outcome]:
        """The outcomes worth a branch after `num_draft` draft tokens, likeliest first."""
        alpha = self.acceptance
        outcomes: list[Outcome] = []
        for a in range(num_draft + 1):
            reach = alpha**a if a == num_draft else alpha**a * (1 - alpha)
            ranks = self._after_all if a == num_draft else self._after_rejection
            outcomes += [Outcome(reach * ranks.share(rank), a, rank) for rank in range(MAX_RANK)]
        worth = [outcome for outcome in outcomes if outcome.likelihood >= WORTH_DRAFTING]
        return sorted(worth, key=lambda outcome: (-outcome.likelihood, outcome.rank, -outcome.accepted))
