"""A drafter whose q is uniform over the vocabulary: it proposes random tokens."""

from __future__ import annotations

from collections.abc import Sequence

from draft_worker.drafters.registry import DRAFTERS
from draft_worker.drafters.tokens import FixedScorer, Row, of_scorers

NAME = "uniform"


class UniformScorer(FixedScorer):
    """The same score for every token, whatever the text is."""

    def score(self, text: Sequence[int], row: Row) -> None:
        row.fill(0.0)


def register() -> None:
    DRAFTERS[NAME] = of_scorers(lambda built, config: UniformScorer)
