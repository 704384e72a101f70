"""Draft tokens from the sequence's own text: what followed the last time it went like this. Pure.

Prompt lookup (Saxena 2023, "Prompt lookup decoding"): code, edits, extracts and lists say again what they
have said. Such a proposal needs no model and no way to a draft worker and back; the target judges it as it
does any other, so it changes no token.
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
"""Tokens that must agree."""
LONGEST = 16
"""Tokens that are compared: a longer match says nothing more."""
CANDIDATES = 8
"""Earlier places that are looked at, the newest first."""
REACH = 16_384
"""Tokens that are looked back when a sequence is first asked about."""
GRADES = (3, 5, 9)
"""A new grade of guesses begins at each of these lengths of the match."""
PRIOR_RATES = (0.4, 0.55, 0.7, 0.85)
"""Acceptance of a copied token in each grade, until verdicts are there."""


def grade_of(match_length: int) -> int:
    """The grade of copies after a match of that many tokens."""
    return bisect_right(GRADES, match_length)


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier place at which the text went as it does now."""

    length: int
    """Tokens that agree, `LONGEST` at most."""
    start: int
    """The token that followed there."""


@dataclass(slots=True)
class TextIndex:
    """Where each pair of tokens was seen, newest first. Holds no tokens: they are the ledger's."""

    _newest: dict[int, int] = field(default_factory=dict)
    """By pair, the index of its second token where it was last seen."""
    _before: array[int] = field(default_factory=lambda: array("q"))
    """For each indexed token, where its pair was seen before; -1 where it was not."""
    _first: int | None = None
    """The first indexed token."""

    def find(self, tokens: Sequence[int]) -> Match | None:
        """The longest match for the end of `tokens`, the newest among equals; None without one.

        `tokens` only ever grows between two calls.
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
        """Index all but the last token, whose pair is the one that is looked for."""
        if self._first is None:
            self._first = max(1, last - REACH)
        for i in range(self._first + len(self._before), last):
            pair = _pair(tokens, i)
            self._before.append(self._newest.get(pair, -1))
            self._newest[pair] = i


def _pair(tokens: Sequence[int], end: int) -> int:
    """One number for two token ids: half the memory of a tuple, of which a long prompt has thousands."""
    return tokens[end - 1] << 32 | tokens[end]


def _agreement(tokens: Sequence[int], end: int, last: int) -> int:
    """How many tokens up to `end` are those up to `last`; the last two are."""
    length, most = SHORTEST, min(LONGEST, end + 1)
    while length < most and tokens[end - length] == tokens[last - length]:
        length += 1
    return length


def copied(tokens: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `start` on; past the end it goes on with what it has copied, as a period does."""
    length = len(tokens)
    period = length - start
    return tuple(tokens[start + i % period] for i in range(count))


@dataclass(slots=True)
class PromptLookup:
    """A context source: what followed the last time the text went as it does now."""

    name: str = NAME
    _index: TextIndex = field(default_factory=TextIndex)

    def guess(self, tokens: Sequence[int], most: int, after: Sequence[int] = ()) -> Guess | None:
        """A copy of `most` tokens; None where nothing like the end of the text came before.

        Where the text repeats itself, it is taken to go on as it did. Then the match behind `after` is
        longer by these tokens; where they are no copy of what followed, there is no guess.
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
