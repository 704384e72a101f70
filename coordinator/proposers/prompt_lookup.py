"""Draft tokens copied from an earlier place in the sequence's own text. Pure.

Prompt lookup (Saxena 2023, "Prompt lookup decoding"): code, edits, extracts and lists repeat themselves. Such
a proposal needs no model and no round trip to a draft worker. The target judges it like any other, so it
changes no token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from coordinator.proposers.interface import ContextSource, Guess
from coordinator.proposers.occurrences import Occurrences, agreement
from coordinator.sequence.round_record import PROMPT_LOOKUP
from paceline.core import limits

NAME: Final = PROMPT_LOOKUP

CANDIDATES = 8
"""Number of earlier places to compare, newest first."""
GRADES = (3, 5, 9)
"""Match lengths at which a new grade of guesses begins."""
PRIOR_RATES = (0.4, 0.55, 0.7, 0.85)
"""Prior acceptance of a copied token in each grade."""


def grade_of(match_length: int) -> int:
    """The grade of copies after a match of that many tokens."""
    return bisect_right(GRADES, match_length)


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

    def find(self, tokens: Sequence[int]) -> Match | None:
        """The longest match for the end of `tokens`, the newest among equals; None without one.

        `tokens` may only grow between calls.
        """
        last = len(tokens) - 1
        if last < self._places.width:
            return None
        self._places.take_in(tokens, last)
        length, start = self.shortest - 1, -1
        for end in islice(self._places.ends(tokens, last), CANDIDATES):
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


@dataclass(slots=True)
class PromptLookup(ContextSource):
    """A context source that copies the continuation of the latest matching text."""

    index: TextIndex = field(default_factory=TextIndex)
    name: str = NAME

    def guess(self, tokens: Sequence[int], most: int, after: Sequence[int] = ()) -> Guess | None:
        """A copy of `most` tokens; None if the end of the text did not occur before.

        A match behind `after` counts its tokens too. If `after` is not a copy of the continuation, there is
        no guess.
        """
        match = self.index.find(tokens)
        if match is None:
            return None
        token_ids = copied(tokens, match.start, len(after) + most)
        if token_ids[: len(after)] != tuple(after):
            return None
        length = min(match.length + len(after), self.index.longest)
        grade = grade_of(length)
        return Guess(self.name, token_ids[len(after) :], length, grade, PRIOR_RATES[grade])
