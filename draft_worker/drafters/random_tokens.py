"""`random`: q is uniform over the vocabulary, so that any text gains a little (Leviathan et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draft_worker.drafters.tokens import FixedScorer, Row, TextScorer
from paceline.core.config import DraftConfig
from paceline.engine.loading.build import Built


class UniformScorer(FixedScorer):
    """The same score for every token."""

    def score(self, text: Sequence[int], row: Row) -> None:
        """See `TextScorer`. Sampling divides by the sum, so that any constant is log q."""
        row.fill(0.0)


def random_tokens(built: Built, config: DraftConfig) -> Callable[[], TextScorer]:
    """Makes the scorer of each sequence."""
    return UniformScorer
