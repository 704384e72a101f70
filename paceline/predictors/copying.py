"""Places of a text that match its end, and copies of what followed there. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from paceline.core import limits
from paceline.predictors.occurrences import Occurrences, agreement

CANDIDATES = 8
"""Number of earlier places to compare, newest first."""


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier place whose text matches the end of the text."""

    length: int
    """Number of matching tokens, as far as they are compared."""
    start: int
    """Index of the token after the match."""


@dataclass(slots=True)
class TextIndex:
    """Finds earlier places that match the end of the text."""

    shortest: int = limits.PROMPT_LOOKUP_MIN
    """Shortest match in tokens."""
    longest: int = limits.PROMPT_LOOKUP_MAX
    """Longest compared match in tokens; a longer one counts as that long."""
    _places: Occurrences = field(init=False)

    def __post_init__(self) -> None:
        """Index single tokens only where a match may be so short."""
        self._places = Occurrences(width=min(2, self.shortest))

    def find(self, tokens: Sequence[int], num_tentative: int = 0) -> Match | None:
        """The longest match for the end of `tokens`, the newest among equals; None without one.

        `tokens` may only grow between calls, but for the last `num_tentative` of them. A match does not end
        at one of those.
        """
        last = len(tokens) - 1
        if last < self._places.width:
            return None
        self._places.take_in(tokens, min(last, len(tokens) - num_tentative))
        length, start = self.shortest - 1, -1
        # An earlier call with tentative tokens has indexed the end of the others too.
        earlier = (end for end in self._places.ends(tokens, last) if end < last)
        for end in islice(earlier, CANDIDATES):
            agreed = agreement(tokens, end, tokens, last, self.longest)
            if agreed > length:
                length, start = agreed, end + 1
            if length == self.longest:
                break
        return Match(length, start) if start >= 0 else None


def copied(tokens: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `start` on; beyond the end of the text, the copy repeats itself."""
    length = len(tokens)
    period = length - start
    return tuple(tokens[start + i % period] for i in range(count))
