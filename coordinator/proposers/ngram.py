"""Draft tokens by n-gram counts over the sequence's own text (paceline/predictors/ngram.py). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from coordinator.proposers.interface import ContextSource, Guess
from paceline.predictors.ngram import NgramPredictor

NAME: Final = "ngram"

PRIOR_RATES = (0.35, 0.5, 0.65)
"""Prior acceptance of a token that was predicted from a context of one, two or three tokens."""


@dataclass(slots=True)
class NgramSource(ContextSource):
    """A context source of n-gram counts."""

    name: str = NAME
    _predictor: NgramPredictor = field(default_factory=NgramPredictor)

    def guess(self, tokens: Sequence[int], most: int, after: Sequence[int] = ()) -> Guess | None:
        """The chain of likeliest continuations; None if the last token is new."""
        self._predictor.take_in(tokens)
        token_ids, length = self._predictor.predict(most, after)
        if not token_ids:
            return None
        return Guess(self.name, tuple(token_ids), length, length, PRIOR_RATES[length - 1])
