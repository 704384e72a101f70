"""Draft tokens copied from an earlier place in the sequence's own text. Pure.

Prompt lookup (Saxena 2023, "Prompt lookup decoding"): code, edits, extracts and lists repeat themselves. Such
a proposal needs no model and no round trip to a draft worker. The target judges it like any other, so it
changes no token.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from coordinator.proposers.interface import Guess
from coordinator.sequence.round_record import PROMPT_LOOKUP

NAME: Final = PROMPT_LOOKUP

SHORTEST = 2
"""Shortest match in tokens."""
LONGEST = 16
"""Longest compared match in tokens; a longer one adds no information."""
CANDIDATES = 8
"""Number of earlier places to compare, newest first."""
REACH = 16_384
"""Number of tokens indexed at a sequence's first lookup."""
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
    """Number of matching tokens, at most `LONGEST`."""
    start: int
    """Index of the token after the match."""


@dataclass(slots=True)
class TextIndex:
    """Positions of each pair of tokens, newest first. The tokens themselves stay in the ledger."""

    _newest: dict[int, int] = field(default_factory=dict)
    """By pair, the index of its second token at the latest occurrence."""
    _before: array[int] = field(default_factory=lambda: array("q"))
    """For each indexed token, the previous position of its pair; -1 if there is none."""
    _first: int | None = None
    """The first indexed token."""

    def find(self, tokens: Sequence[int]) -> Match | None:
        """The longest match for the end of `tokens`, the newest among equals; None without one.

        `tokens` may only grow between calls.
        """
        last = len(tokens) - 1
        if last < SHORTEST:
            return None
        self._take_in(tokens, last)
        length = start = 0
        end = self._newest.get(_pair(tokens, last), -1)
        for _ in range(CANDIDATES):
            if end < 0 or length == LONGEST:
                break
            agreed = _agreement(tokens, end, last)
            if agreed > length:
                length, start = agreed, end + 1
            end = self._before[end - self._start]
        return Match(length, start) if length else None

    @property
    def _start(self) -> int:
        assert self._first is not None
        return self._first

    def _take_in(self, tokens: Sequence[int], last: int) -> None:
        """Index all tokens but the last, whose pair is the one to look up."""
        if self._first is None:
            self._first = max(1, last - REACH)
        for i in range(self._first + len(self._before), last):
            pair = _pair(tokens, i)
            self._before.append(self._newest.get(pair, -1))
            self._newest[pair] = i


def _pair(tokens: Sequence[int], end: int) -> int:
    """Encode two token ids as one integer, which takes half the memory of a tuple."""
    return tokens[end - 1] << 32 | tokens[end]


def _agreement(tokens: Sequence[int], end: int, last: int) -> int:
    """Number of equal tokens ending at `end` and at `last`; the last two are known to be equal."""
    length, most = SHORTEST, min(LONGEST, end + 1)
    while length < most and tokens[end - length] == tokens[last - length]:
        length += 1
    return length


def copied(tokens: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `start` on; beyond the end of the text, the copy repeats itself."""
    length = len(tokens)
    period = length - start
    return tuple(tokens[start + i % period] for i in range(count))


@dataclass(slots=True)
class PromptLookup:
    """A context source that copies the continuation of the latest matching text."""

    name: str = NAME
    _index: TextIndex = field(default_factory=TextIndex)

    def guess(self, tokens: Sequence[int], most: int, after: Sequence[int] = ()) -> Guess | None:
        """A copy of `most` tokens; None if the end of the text did not occur before.

        A match behind `after` counts its tokens too. If `after` is not a copy of the continuation, there is
        no guess.
        """
        match = self._index.find(tokens)
        if match is None:
            return None
        token_ids = copied(tokens, match.start, len(after) + most)
        if token_ids[: len(after)] != tuple(after):
            return None
        length = min(match.length + len(after), LONGEST)
        grade = grade_of(length)
        return Guess(self.name, token_ids[len(after) :], length, grade, PRIOR_RATES[grade])
