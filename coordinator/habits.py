"""What becomes of proposals: of drafted ones, and of those copied from a sequence's own text. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from coordinator.acceptance import Acceptance
from coordinator.replay import Replay

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

    drafts: Replay
    copies: CopyAcceptance

    @classmethod
    def of_all(cls, memory: float) -> Habits:
        """Of all sequences of a pair of models."""
        return cls(Replay(memory), CopyAcceptance.of_pair(memory))

    def some(self, memory: float, weight: float) -> Habits:
        """Of some of them, of which nothing is known yet but what all are like."""
        return Habits(
            Replay(memory, self.drafts, weight), CopyAcceptance.of_sequence(memory, self.copies, weight)
        )

    def of(self, match: int) -> Acceptance | Replay:
        """Of tokens copied after a match of so many tokens; without one of drafted tokens."""
        return self.copies.after(match) if match else self.drafts


Kind = tuple[str, int]
"""Requests of a kind are more alike than others: (acceptance mode, temperature in halves, 0 for greedy)."""
HOTTEST = 4
"""Temperatures from this many halves on are one kind."""


def kind_of(mode: str, temperature: float) -> Kind:
    """A draft agrees less often the higher the temperature, and each mode accepts another share of that."""
    return mode, min(math.ceil(2 * temperature), HOTTEST)
