"""Tokens that would complete a bad word: a token sequence that must not be generated.

A word of one token is a constant mask. A longer word forbids its last token after a context that ends in its
other tokens. The context includes the prompt and grows along a proposal as in plain decoding.
Source: NoBadWordsLogitsProcessor of transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Words = tuple[tuple[int, ...], ...]
Ints = npt.NDArray[np.int64]

_ANY: Final = -1
"""Padding before a short prefix: matches every token."""
_NOTHING: Final = -2
"""Padding before a short context: matches no token."""
_SMALL: Final = 1024
"""Words times tokens of the longest word: 128 words with and without a leading space, of 4 tokens each."""


@dataclass(frozen=True, slots=True)
class WordTable:
    """The W words of several tokens, laid out for comparison with the end of a context."""

    prefixes: Ints
    """int64 [W, T]: all tokens but the last, right-aligned; T is the largest number of any word."""
    last: Ints
    """int64 [W]."""

    @classmethod
    def of(cls, words: Words) -> WordTable | None:
        """The table of `words`; None if every word is one token."""
        cells = len(words) * max(map(len, words), default=0)
        return _small_table(words) if cells <= _SMALL else _large_table(words)

    @property
    def context_length(self) -> int:
        """T: number of context tokens that matter."""
        return int(self.prefixes.shape[1])

    def completed_by(
        self, ledger: Sequence[int], drafts: Sequence[int], depths: Ints, paths: Ints
    ) -> tuple[Ints, Ints]:
        """Pairs of a row and a token that would complete a word.

        Args:
            ledger: the sequence's tokens; the last T suffice.
            drafts: the proposal's N nodes.
            depths: [R], number of draft tokens on the path to each row.
            paths: [R, D], nodes on the path to each row, in order; D is at least the largest depth.

        Returns:
            rows and tokens, two int64 [pairs].
        """
        length = self.context_length
        known = np.full(length, _NOTHING, dtype=np.int64)
        tail = np.asarray(ledger[-length:], dtype=np.int64)
        known[length - len(tail) :] = tail
        where = np.arange(length) + depths[:, None]
        if len(drafts):
            nodes = np.take_along_axis(paths, np.maximum(where - length, 0), axis=1)
            where = np.where(where < length, where, length + nodes)
        contexts = np.concatenate((known, np.asarray(drafts, dtype=np.int64)))[where]
        equal = (contexts[:, None] == self.prefixes) | (self.prefixes == _ANY)
        rows, words = np.nonzero(equal.all(-1))
        return rows, self.last[words]


def _table(words: Words) -> WordTable | None:
    longer = [word for word in words if len(word) > 1]
    if not longer:
        return None
    prefixes = np.full((len(longer), max(map(len, longer)) - 1), _ANY, dtype=np.int64)
    for row, word in zip(prefixes, longer, strict=True):
        row[len(row) - len(word) + 1 :] = word[:-1]
    return WordTable(prefixes, np.array([word[-1] for word in longer], dtype=np.int64))


# The caches also keep the words, which take five times as much memory as the table: 60 KB together with a
# small table, 3 MB with the largest.
_small_table = functools.lru_cache(maxsize=256)(_table)
_large_table = functools.lru_cache(maxsize=16)(_table)


def single_tokens(words: Words) -> list[int]:
    """The words of one token."""
    return [word[0] for word in words if len(word) == 1]
