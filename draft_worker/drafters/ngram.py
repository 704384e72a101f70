"""`ngram`: the counts of the text itself, up to order 4, as q."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from draft_worker.drafters.interpolation import interpolated
from draft_worker.drafters.tokens import Row, TextScorer
from paceline.core import limits
from paceline.core.config import DraftConfig
from paceline.engine.loading.build import Built

MAX_CONTEXT: Final = 3
"""Tokens of the longest context: order 4."""

Counts = defaultdict[tuple[int, ...], defaultdict[int, int]]


class NgramScorer:
    """Which tokens followed each context of 1 to 3 tokens in the text's last tokens, and how often.

    q interpolates the contexts at the text's end, from a uniform distribution on (interpolation.py).
    """

    def __init__(self, vocabulary_size: int, window: int = limits.MAX_NGRAM_TOKENS) -> None:
        """`window`: the number of last tokens that count. Each costs up to three entries."""
        self._uniform = 1 / vocabulary_size
        self._window = window
        self._begin = self._end = 0
        """The counted tokens of the text."""
        self._followers: Counts = defaultdict(lambda: defaultdict(int))

    def count(self, text: Sequence[int], length: int) -> None:
        """See `TextScorer`. A token costs the same for every length of the text."""
        begin = max(0, length - self._window)
        if begin >= self._end or length <= self._begin:  # none of the counted tokens remains
            self._followers.clear()
            self._begin = self._end = begin
        for position in (*range(self._begin, begin), *range(length, self._end)):
            self._remove(text, position)
        for position in (*range(begin, self._begin), *range(self._end, length)):
            self._add(text, position)
        self._begin, self._end = begin, length

    def _add(self, text: Sequence[int], position: int) -> None:
        for context in _contexts(text, position):
            self._followers[context][text[position]] += 1

    def _remove(self, text: Sequence[int], position: int) -> None:
        for context in _contexts(text, position):
            followers = self._followers[context]
            followers[text[position]] -= 1
            if not followers[text[position]]:
                del followers[text[position]]
                if not followers:
                    del self._followers[context]

    def has_context(self, text: Sequence[int]) -> bool:
        """True if the last token occurs before, among the tokens that count."""
        return (text[-1],) in self._followers

    def score(self, text: Sequence[int], row: Row) -> None:
        """See `TextScorer`. A longer context never occurs where a shorter one does not."""
        known = [self._followers[c] for c in _contexts(text, len(text)) if c in self._followers]
        listed, rest = interpolated(known, self._uniform)
        row.fill(math.log(rest))
        for token, q in listed.items():
            row[token] = math.log(q)


def _contexts(text: Sequence[int], position: int) -> Iterator[tuple[int, ...]]:
    """The tokens before a position, from the shortest context to the longest."""
    for count in range(1, min(MAX_CONTEXT, position) + 1):
        yield tuple(text[position - count : position])


def ngram(built: Built, config: DraftConfig) -> Callable[[], TextScorer]:
    """Makes the scorer of each sequence."""
    return lambda: NgramScorer(built.loaded.vocab_size)
