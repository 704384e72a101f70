"""What is measured: drafters as functions from a text to the logits of its next token.

A model, a table and a guess copied from the text all become a `MeasuredDrafter`. Those without a model are
taken from two registries: the draft worker's drafters that score texts, the coordinator's context sources.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from coordinator.proposers import grammar
from coordinator.proposers.interface import ContextSource
from coordinator.proposers.registry import CONTEXT_SOURCES, SourceSetting
from draft_worker.drafters.registry import DRAFTERS, kind_of
from draft_worker.drafters.tokens import TextDrafterKind, TextScorer
from paceline.core.clock import Clock
from paceline.core.config import DraftConfig
from paceline.core.errors import InvalidArgumentError
from paceline.engine.loading.build import Built

SOURCES: Final = {
    # Without the source of tokens that a grammar forces: the texts have none.
    f"source:{name}" if name in DRAFTERS else name: make
    for name, make in CONTEXT_SOURCES.items()
    if name != grammar.NAME
}
"""The context sources by the names that they have here: `source:ngram` differs from the drafter `ngram`."""


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """The scores of one token."""

    logits: Tensor
    """Float32 [vocabulary]; all -inf where the drafter has no guess."""
    seconds: float | None
    """Time of the step; None if it read more than one token."""


class MeasuredDrafter(Protocol):
    """Scores the tokens of one text at a time, in order."""

    name: str
    operations: float
    """Parameters that a token is multiplied with; 0 for a table."""
    weight_bytes: float
    """Bytes of weights that a step reads; 0 for a table."""

    def begin(self) -> None:
        """Another text follows."""

    def score(self, text: Sequence[int]) -> ScoredRow:
        """Score the token after `text`, which extends the one of the call before."""


class ScoringDrafter:
    """A drafter of the draft worker that scores texts, such as a table."""

    operations = weight_bytes = 0.0

    def __init__(self, name: str, new: Callable[[], TextScorer], vocab_size: int, clock: Clock) -> None:
        """`new` makes the scorer of one text."""
        self.name = name
        self._new = new
        self._vocab_size = vocab_size
        self._clock = clock

    def begin(self) -> None:
        """A scorer belongs to one text."""
        self._scorer = self._new()
        self._length = 0

    def score(self, text: Sequence[int]) -> ScoredRow:
        """The scorer's log q; see `MeasuredDrafter`."""
        row = np.empty(self._vocab_size, dtype=np.float32)
        begun = self._clock()
        self._scorer.count(text, len(text))
        self._scorer.score(text, row)
        seconds = self._clock() - begun
        read, self._length = len(text) - self._length, len(text)
        return ScoredRow(torch.from_numpy(row), seconds if read == 1 else None)


class GuessingDrafter:
    """A context source of the coordinator. Its guess counts as drawn from a point mass."""

    operations = weight_bytes = 0.0

    def __init__(
        self, name: str, make: Callable[[SourceSetting], ContextSource], vocab_size: int, clock: Clock
    ) -> None:
        """`make` makes the source of one text."""
        self.name = name
        self._make = make
        self._nothing = torch.full((vocab_size,), -math.inf)
        self._clock = clock

    def begin(self) -> None:
        """A source belongs to one text, and learns nothing from others here."""
        self._source = self._make(SourceSetting())
        self._length = 0

    def score(self, text: Sequence[int]) -> ScoredRow:
        """0 for the guessed token, -inf for all others; see `MeasuredDrafter`."""
        begun = self._clock()
        guess = self._source.guess(text, 1)
        seconds = self._clock() - begun
        read, self._length = len(text) - self._length, len(text)
        logits = self._nothing
        if guess is not None:
            logits = logits.clone()
            logits[guess.token_ids[0]] = 0.0
        return ScoredRow(logits, seconds if read == 1 else None)


def check_drafter(name: str) -> TextDrafterKind | None:
    """The draft worker's drafter of a name; None for a context source.

    Raises InvalidArgumentError naming `drafter` for any other name.
    """
    if name in SOURCES:
        return None
    if name in DRAFTERS or ":" in name:
        kind = kind_of(DraftConfig(model=name, drafter=name))
        if isinstance(kind, TextDrafterKind):
            return kind
    tables = [each for each, kind in DRAFTERS.items() if isinstance(kind, TextDrafterKind)]
    known = ", ".join([*tables, "stacked:a+b", *SOURCES])
    raise InvalidArgumentError("drafter", f"must be one of {known}, got {name!r}")


def check_corpus(corpus: str, names: Sequence[str]) -> None:
    """Raises InvalidArgumentError naming `corpus` if it is given and none of the drafters reads it."""
    kinds = [check_drafter(name) for name in names]
    if corpus and not any(kind is not None and kind.reads_corpus for kind in kinds):
        raise InvalidArgumentError("corpus", "is not read by any of the drafters")


def make_drafter(name: str, target: Built, config: DraftConfig, clock: Clock) -> MeasuredDrafter:
    """The drafter of a name, with the target's tokenizer.

    Raises InvalidArgumentError naming `drafter`, or `corpus` for a text that cannot be counted.
    """
    kind, vocab_size = check_drafter(name), target.loaded.vocab_size
    if kind is None:
        return GuessingDrafter(name, SOURCES[name], vocab_size, clock)
    own = replace(config, drafter=name, corpus=config.corpus if kind.reads_corpus else "")
    return ScoringDrafter(name, kind.scorers(target, own), vocab_size, clock)
