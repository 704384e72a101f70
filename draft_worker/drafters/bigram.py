"""`bigram`: how often each token follows the last one in a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from draft_worker.drafters.corpus import CorpusCounts, count_corpus
from draft_worker.drafters.interpolation import rest_weight
from draft_worker.drafters.tokens import FixedScorer, Row, TextScorer
from draft_worker.drafters.unigram import frequencies
from paceline.core.config import DraftConfig
from paceline.engine.loading.build import Built


class BigramScorer(FixedScorer):
    """q_2, interpolated with the frequencies of single tokens (interpolation.py)."""

    def __init__(self, counts: CorpusCounts) -> None:
        self._counts = counts
        self._singles = frequencies(counts)
        self._scores = np.log(self._singles)

    def has_context(self, text: Sequence[int]) -> bool:
        """True if a token follows the last one anywhere in the counted text."""
        return len(self._counts.after(text[-1])[0]) > 0

    def score(self, text: Sequence[int], row: Row) -> None:
        """See `TextScorer`."""
        followers, pairs = self._counts.after(text[-1])
        if not len(followers):
            row[:] = self._scores
            return
        total = int(pairs.sum())
        rest = rest_weight(total, len(followers))
        row[:] = self._scores + math.log(rest)
        row[followers] = np.log((1 - rest) * pairs / total + rest * self._singles[followers])


def bigram(built: Built, config: DraftConfig) -> Callable[[], TextScorer]:
    """Makes the scorer of each sequence: one for all. Raises InvalidArgumentError naming `corpus`."""
    scorer = BigramScorer(count_corpus(built, config))
    return lambda: scorer
