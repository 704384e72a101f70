"""How likely a draft token is accepted, by its position in the proposal. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
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
    """Of the draft tokens that are looked at, the share accepted at each position; newer ones count more."""

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
        """Take in one verdict. Tokens after the first rejected one were not looked at."""
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
        for i, reached in enumerate(self.reached):
            if reached > weight:
                self.accepted[i] *= weight / reached
                self.reached[i] = weight

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


MATCHES = (3, 5, 9)
"""Lengths of a match from which on tokens that were copied after it are counted together."""
COPIES = (0.4, 0.55, 0.7, 0.85)
"""Acceptance of copied tokens of which nothing is known, after a match of each kind."""


@dataclass(slots=True)
class CopyAcceptance:
    """Of tokens copied from the sequence's own text, by how long a match they followed."""

    kinds: tuple[Acceptance, ...]

    @classmethod
    def of_pair(cls, memory: float) -> CopyAcceptance:
        """What all sequences share."""
        return cls(tuple(Acceptance(memory, newcomer=rate) for rate in COPIES))

    @classmethod
    def of_sequence(cls, memory: float, pair: CopyAcceptance, weight: float) -> CopyAcceptance:
        """A new sequence is expected to be like those before it."""
        return cls(tuple(Acceptance(memory, kind, weight) for kind in pair.kinds))

    def after(self, match: int) -> Acceptance:
        """Of tokens after a match of so many tokens."""
        return self.kinds[self.kind(match)]

    def kind(self, match: int) -> int:
        """Matches of so many tokens are counted at this place."""
        return bisect_right(MATCHES, match)


@dataclass(frozen=True, slots=True)
class Habits:
    """What is accepted of some sequences."""

    drafts: Acceptance
    copies: CopyAcceptance

    @classmethod
    def of_all(cls, memory: float) -> Habits:
        """Of all sequences of a pair of models."""
        return cls(Acceptance(memory), CopyAcceptance.of_pair(memory))

    def some(self, memory: float, weight: float) -> Habits:
        """Of some of them, of which nothing is known yet but what all are like."""
        return Habits(
            Acceptance(memory, self.drafts, weight), CopyAcceptance.of_sequence(memory, self.copies, weight)
        )

    def of(self, match: int) -> Acceptance:
        """Of tokens copied after a match of so many tokens; without one of drafted tokens."""
        return self.copies.after(match) if match else self.drafts


Kind = tuple[str, int]
"""Requests of a kind are more alike than others: (acceptance mode, temperature in halves, 0 for greedy)."""
HOTTEST = 4
"""Temperatures from this many halves on are one kind."""


def kind_of(mode: str, temperature: float) -> Kind:
    """A draft agrees less often the higher the temperature, and each mode accepts another share of that."""
    return mode, min(math.ceil(2 * temperature), HOTTEST)


def expected_tokens(rates: Sequence[float]) -> list[float]:
    """Tokens of a round with 0 to len(rates) draft tokens: 1 + a1 + a1 a2 + ... (Leviathan et al., eq. 1)."""
    expected, reach = [1.0], 1.0
    for rate in rates:
        reach *= rate
        expected.append(expected[-1] + reach)
    return expected
