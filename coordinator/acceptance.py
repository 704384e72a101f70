"""How likely a copied token is accepted, by its position in the proposal; and tokens a round. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

NEWCOMER = 0.7
"""Acceptance of a pair of models that nothing is known of."""
PRIOR_WEIGHT = 24.0
"""Tokens that what is known beforehand counts for."""
HIGHEST = 0.98
"""No estimate is above this: nobody can have seen that a position never fails."""


@dataclass(slots=True)
class Acceptance:
    """Of the tokens that are looked at, the share accepted at each position; newer ones count more.

    It is that of a proposal that begins where these did. What is drafted begins anywhere: replay.py.
    """

    memory: float
    """Rounds after which an old one has lost its say."""
    prior: Acceptance | None = None
    """What a position is like before it was seen here: all sequences of the pair, for one sequence."""
    prior_weight: float = PRIOR_WEIGHT
    newcomer: float = NEWCOMER
    """Without a prior: what a position is like of which nothing is known."""
    reached: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    observed: int = 0
    """Grows whenever something is learned."""

    def observe(self, num_draft: int, num_accepted: int) -> None:
        """Take in one verdict, here and in the prior; what follows a rejected token was not looked at."""
        if self.prior is not None:
            self.prior.observe(num_draft, num_accepted)
        for counts in (self.reached, self.accepted):
            counts.extend([0.0] * (num_draft - len(counts)))
        self.observed += 1
        keep = 1 - 1 / self.memory
        for i in range(min(num_accepted + 1, num_draft)):
            self.reached[i] = self.reached[i] * keep + 1
            self.accepted[i] = self.accepted[i] * keep + (i < num_accepted)

    def fade(self, weight: float) -> None:
        """Let what was known count for at most `weight` tokens a position: it is long ago."""
        self.observed += 1
        self.prior_weight = min(self.prior_weight, weight)
        fade(self.reached, self.accepted, weight)

    def rates(self, most: int) -> list[float]:
        """Acceptance at positions 0 to `most` - 1, given that the position is reached.

        A position that was seldom seen is like the prior's, however good the ones before it were here: those
        who got there were the better ones, and that is in the prior already.
        """
        priors = self.prior.rates(most) if self.prior is not None else None
        rates: list[float] = []
        before = self.newcomer
        for i in range(most):
            guess = priors[i] if priors is not None else before
            if i < len(self.reached):
                weight = self.prior_weight
                guess = (weight * guess + self.accepted[i]) / (weight + self.reached[i])
            before = min(guess, HIGHEST)
            rates.append(before)
        return rates

    def expected(self, most: int) -> list[float]:
        """Tokens of a round with 0 to `most` of them."""
        return expected_tokens(self.rates(most))


def fade(counts: list[float], parts: list[float], most: float) -> None:
    """Let each count be at most `most`, and of each the part what it was."""
    for i, count in enumerate(counts):
        if count > most:
            parts[i] *= most / count
            counts[i] = most


def expected_tokens(rates: Sequence[float]) -> list[float]:
    """Tokens of a round with 0 to len(rates) draft tokens: 1 + a1 + a1 a2 + ... (Leviathan et al., eq. 1)."""
    expected, reach = [1.0], 1.0
    for rate in rates:
        reach *= rate
        expected.append(expected[-1] + reach)
    return expected
