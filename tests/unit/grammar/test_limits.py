"""Limits apply to one text, though texts with the same structure share counters."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from llguidance import LLParserLimits

from paceline.core.errors import InternalError, InvalidArgumentError
from paceline.core.structured import StructuredOutputs
from paceline.grammar import Grammars, GrammarState, compiler
from tests.unit.grammar.tiny import TOKENS, grammars

WANTED = StructuredOutputs(regex="[ab]{1,200}")
"""Each letter is another state of the lexer."""
A, B, C = (TOKENS.index(letter) for letter in "abc")


@pytest.fixture(autouse=True)
def few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    few = LLParserLimits(max_lexer_states=40, verbose_errors=False)
    monkeypatch.setattr(compiler, "_LIMITS", few)


def letters(count: int) -> list[int]:
    return [A, B] * (count // 2) + [A] * (count % 2)


def room(state: GrammarState, step: int = 1) -> int:
    """Letters after which the structure is given up, asked after every so many."""
    for count in range(0, 200, step):
        try:
            (row,) = state.masks(letters(count))
        except InvalidArgumentError:
            return count
        assert set(np.flatnonzero(row)) >= {A, B}
    raise AssertionError("it was never given up")


def use_up(known: Grammars) -> None:
    """Of what others share."""
    room(known.start(WANTED))


def test_one_sequences_state_limit_does_not_affect_others(compiled: list[StructuredOutputs]) -> None:
    """Nor later sequences."""
    known = grammars(clock=lambda: 0.0)
    running, further = known.start(WANTED), known.start(WANTED)
    want = [running.masks(letters(count)).tolist() for count in (0, 5)]
    further.masks(letters(3))
    use_up(known)
    assert [running.masks(letters(count)).tolist() for count in (0, 5)] == want
    assert further.masks(letters(3), letters(4)[3:]).shape == (2, len(TOKENS))
    assert known.start(WANTED).masks([]).tolist() == want[0]
    known.check(WANTED)
    assert len(compiled) <= 5, "each has its own at most"


@pytest.mark.parametrize("step", [1, 3])
def test_the_state_limit_depends_on_no_other_sequence(step: int) -> None:
    alone = room(grammars(clock=lambda: 0.0).start(WANTED), step)
    known = grammars(clock=lambda: 0.0)
    others = [known.start(WANTED) for _ in range(3)]
    for i, other in enumerate(others):
        other.masks([B] * i, letters(10))
    state = known.start(WANTED)
    assert room(state, step) == alone
    assert room(state, step) == alone
    with pytest.raises(InvalidArgumentError, match="too many states"):
        state.masks(letters(alone))
    assert [room(other, step) for other in others] == [alone] * 3


def test_a_text_too_long_behind_a_draft_continues_elsewhere() -> None:
    known = grammars(clock=lambda: 0.0)
    state = known.start(WANTED)
    rows = state.masks([], letters(60))
    assert 1 < len(rows) < 61
    assert state.masks([], letters(60)).tolist() == rows.tolist()
    assert state.masks([B], [A]).tolist() == known.start(WANTED).masks([B], [A]).tolist()


def test_an_exhausted_lexer_is_not_a_grammars_refusal() -> None:
    """The lexer refuses a token without saying that it gave up."""
    known = grammars(clock=lambda: 0.0)
    state, following = known.start(WANTED), known.start(WANTED)
    state.masks(letters(2))
    use_up(known)
    # As if nobody had told.
    shared = known._compiled["", WANTED]
    shared.renewals, shared._matcher = state._renewals, state._base
    assert following.follows(letters(6), math.inf)
    assert state.masks(letters(6)).any()


@pytest.mark.parametrize("tokens", [[C], [A, C]])
def test_a_grammars_refusal_compiles_once(tokens: Sequence[int], compiled: list[StructuredOutputs]) -> None:
    known = grammars(clock=lambda: 0.0)
    state = known.start(WANTED)
    for _ in range(3):
        assert not state.follows(tokens, math.inf)
        with pytest.raises(InternalError, match="violate"):
            state.masks(tokens)
    assert len(compiled) == 1


HARD = StructuredOutputs(regex="(a|b)*a(a|b){100}c")
"""Nearly every token leads to states that no other text has led to."""


def long_text(seed: int, length: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.choice((A, B)) for _ in range(length)]


def test_a_long_text_can_be_followed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's costs of single tokens must not add up."""
    monkeypatch.undo()
    text = long_text(1, 6000)
    other = [*text[:5900], A + B - text[5900]]

    def elsewhere() -> GrammarState:
        return grammars(clock=lambda: 0.0).start(HARD)

    state = elsewhere()
    for count in range(0, len(text), 50):
        state.masks(text[:count])
    want = state.masks(text).tolist()
    assert elsewhere().masks(text).tolist() == want
    assert elsewhere().follows(text, math.inf)
    assert state.masks(other).tolist() == elsewhere().masks(other).tolist()
    assert state.masks(text).tolist() == want


def test_sequences_exhausting_a_shared_state_separate_once(
    compiled: list[StructuredOutputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each alone needs less than all; together they would exhaust it again."""
    monkeypatch.setattr(compiler, "_LIMITS", LLParserLimits(max_lexer_states=400, verbose_errors=False))
    known = grammars(clock=lambda: 0.0)
    texts = [long_text(seed, 100) for seed in range(8)]
    states = [known.start(HARD) for _ in texts]
    assert len(compiled) == 1
    for count in range(101):
        for state, text in zip(states, texts, strict=True):
            assert state.masks(text[:count]).any()
    assert 1 < len(compiled) <= 2 + len(texts), "two to share, and one for each"
