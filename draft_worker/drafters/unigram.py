"""`unigram`: how often each token occurs in a text, whatever stands before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from draft_worker.drafters.corpus import CorpusCounts, count_corpus
from draft_worker.drafters.interpolation import rest_weight
from draft_worker.drafters.tokens import FixedScorer, Row, TextScorer
from paceline.core.config import DraftConfig
from paceline.engine.loading.build import Built


def frequencies(counts: CorpusCounts) -> npt.NDArray[np.float64]:
    """q_1, float64 [vocabulary]: interpolated with a uniform distribution (interpolation.py)."""
    singles = counts.singles.astype(np.float64)
    rest = rest_weight(int(singles.sum()), int((singles > 0).sum()))
    q: npt.NDArray[np.float64] = (1 - rest) * singles / singles.sum() + rest / len(singles)
    return q


class UnigramScorer(FixedScorer):
    """The same scores after every text."""

    def __init__(self, counts: CorpusCounts) -> None:
        self._scores = np.log(frequencies(counts)).astype(np.float32)

    def score(self, text: Sequence[int], row: Row) -> None:
        """See `TextScorer`."""
        row[:] = self._scores


def unigram(built: Built, config: DraftConfig) -> Callable[[], TextScorer]:
    """Makes the scorer of each sequence: one for all. Raises InvalidArgumentError naming `corpus`."""
    scorer = UnigramScorer(count_corpus(built, config))
    return lambda: scorer
