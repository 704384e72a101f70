"""Scorers of texts and context sources as drafters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from coordinator.proposers import grammar
from coordinator.proposers.interface import ContextSource, Guess
from coordinator.proposers.registry import CONTEXT_SOURCES
from draft_worker.drafters.registry import DRAFTERS
from draft_worker.drafters.tokens import FixedScorer, Row
from paceline import assets
from paceline.core.clock import ManualClock
from paceline.core.config import DraftConfig
from paceline.core.errors import InvalidArgumentError
from paceline.engine.loading.build import build_vocabulary
from paceline.measure.drafters import (
    SOURCES,
    GuessingDrafter,
    ScoringDrafter,
    check_corpus,
    check_drafter,
    make_drafter,
)


class Sevens(ContextSource):
    """Guesses 7 after an even number of tokens, which takes it a second."""

    name = "sevens"

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    def guess(self, tokens: Sequence[int], most: int, after: Sequence[int] = ()) -> Guess | None:
        self._clock.advance(1.0)
        return None if len(tokens) % 2 else Guess(self.name, (7,) * most, 0)


class Counter(FixedScorer):
    """Scores each token by its number and the text's length, in a quarter of a second."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.counted = 0

    def count(self, text: Sequence[int], length: int) -> None:
        self.counted = length

    def score(self, text: Sequence[int], row: Row) -> None:
        self._clock.advance(0.25)
        row[:] = np.arange(len(row)) + self.counted


def test_a_guess_becomes_a_point_mass() -> None:
    clock = ManualClock()
    drafter = GuessingDrafter("sevens", lambda _: Sevens(clock), 10, clock)
    drafter.begin()
    guess, nothing = drafter.score([1, 2]), drafter.score([1, 2, 3])
    assert guess.logits.softmax(-1).tolist() == [float(token == 7) for token in range(10)]
    assert nothing.logits.tolist() == [-math.inf] * 10
    assert (guess.seconds, nothing.seconds) == (None, 1.0)
    assert (drafter.name, drafter.operations, drafter.weight_bytes) == ("sevens", 0, 0)


def test_scores_are_those_of_a_new_scorer_for_each_text() -> None:
    clock, made = ManualClock(), []
    drafter = ScoringDrafter("table", lambda: made.append(Counter(clock)) or made[-1], 3, clock)
    for _ in range(2):
        drafter.begin()
        first, second = drafter.score([3, 1]), drafter.score([3, 1, 2])
        assert first.logits.tolist() == [2, 3, 4]
        assert second.logits.tolist() == [3, 4, 5]
        assert (first.seconds, second.seconds) == (None, 0.25)
    assert len(made) == 2


@pytest.mark.slow
def test_every_drafter_without_a_model_can_be_measured(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("for i in range(10):\n    print(i)\n" * 20)
    config = DraftConfig(model="m", corpus=str(tmp_path / "corpus.txt"))
    target = build_vocabulary(DraftConfig(model=str(assets.path("target"))))
    text, next_token = [*[35, 36, 37, 38] * 3, 35, 36, 37], 38
    names = [*(name for name in DRAFTERS if name != "model"), "stacked:ngram+bigram", *SOURCES]
    assert len(names) == len(set(names)) == len(DRAFTERS) + len(CONTEXT_SOURCES) - 1
    for name in names:
        drafter = make_drafter(name, target, config, ManualClock())
        drafter.begin()
        logits = drafter.score(text).logits
        assert drafter.name == name
        assert logits.shape == (target.loaded.vocab_size,)
        if name in SOURCES or "ngram" in name:
            assert logits.argmax() == next_token
        drafter.begin()
        assert name not in SOURCES or not drafter.score(text[-2:]).logits.isfinite().any()


def test_the_source_and_the_drafter_of_one_name_differ() -> None:
    assert {"ngram", "source:ngram"} <= {*DRAFTERS, *SOURCES}
    assert grammar.NAME not in SOURCES
    assert check_drafter("source:ngram") is None
    assert check_drafter("ngram") is not None


@pytest.mark.parametrize("name", ["clairvoyance", "model", "grammar", "source:suffix", "stacked:ngram+model"])
def test_an_unknown_drafter_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        check_drafter(name)
    assert refused.value.field == "drafter"


def test_a_corpus_that_no_drafter_reads_is_refused() -> None:
    check_corpus("text.txt", ["prompt-lookup", "bigram"])
    check_corpus("", [])
    with pytest.raises(InvalidArgumentError, match="not read") as refused:
        check_corpus("text.txt", ["ngram", "prompt-lookup"])
    assert refused.value.field == "corpus"
