"""Masks against enumeration of finite languages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core import limits
from paceline.core.errors import InternalError, InvalidArgumentError
from paceline.core.structured import StructuredOutputs
from paceline.grammar import GrammarState, Mask
from paceline.grammar import state as state_module
from tests.unit.grammar.tiny import END, LANGUAGES, OTHER, TOKENS, VOCAB, Language, grammars, text_of


def paths(language: Language) -> Iterator[tuple[int, ...]]:
    """Every way to spell every beginning of a text that the masks leave open."""
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        path = waiting.pop()
        yield path
        row = language.start().masks(path)[0]
        waiting += [(*path, token) for token in sorted(tokens_of(row)) if token != END]


def spelled_otherwise(language: Language, tokens: tuple[int, ...], path: tuple[int, ...]) -> bool:
    """True when a token on the way from `path` is a forced text's, but not the one token that may come."""
    state = language.start()
    return any(
        language.is_forced(tokens[:i]) and not state.masks(tokens[:i])[0][tokens[i]]
        for i in range(len(path), len(tokens))
    )


def tokens_of(row: Mask) -> set[int]:
    return {int(token) for token in np.flatnonzero(row)}


@pytest.mark.parametrize("name", LANGUAGES)
def test_masks_allow_exactly_the_possible_next_tokens(name: str) -> None:
    language, checked = LANGUAGES[name], 0
    shared = language.start()
    for path in paths(language):
        fresh = language.start()
        for state in (fresh, shared):
            (row,) = state.masks(path)
            assert language.agrees(row, path), text_of(path)
        checked += 1
    assert checked >= 3


@pytest.mark.parametrize("name", LANGUAGES)
def test_every_row_of_every_proposal_is_correct(name: str) -> None:
    """Rows behind a forbidden token, or behind the end, may be anything: no text reaches them."""
    language = LANGUAGES[name]
    state = language.start()
    lost = 0
    for path in itertools.islice(paths(language), 12):
        for drafts in itertools.product(range(VOCAB), repeat=2):
            rows = state.masks(path, drafts)
            assert rows.shape == (3, VOCAB)
            for i, row in enumerate(rows):
                before = (*path, *drafts[:i])
                # A forced text may have to be spelled as the tokenizer does.
                lost += language.allowed(before) is None
                assert language.agrees(row, before) or (
                    row.all() and spelled_otherwise(language, before, path)
                )
    assert lost


def test_longer_proposals_are_walked_to_their_end() -> None:
    language = LANGUAGES["one text"]
    abc = TOKENS.index("abc")
    rows = language.start().masks([], [abc, abc, END])
    assert [tokens_of(row) for row in rows[:3]] == [{abc}, {abc}, {END}]
    assert rows[3].all()
    ways = LANGUAGES["regex with anchors"]
    a, b = TOKENS.index("a"), TOKENS.index("b")
    rows = ways.start().masks([], [a, a, a, b, END])
    assert all(ways.agrees(rows[i], [a, a, a, b][:i]) for i in range(5))
    assert rows[5].all()


@settings(max_examples=60, deadline=None)
@given(
    queries=st.lists(
        st.tuples(
            st.lists(st.integers(0, VOCAB - 1), max_size=4), st.lists(st.integers(0, VOCAB - 1), max_size=4)
        ),
        max_size=8,
    )
)
@pytest.mark.parametrize("name", LANGUAGES)
def test_a_used_state_answers_like_a_new_one(name: str, queries: list[tuple[list[int], list[int]]]) -> None:
    language = LANGUAGES[name]
    state = language.start()
    for generated, drafts in queries:
        answers = []
        for one in (state, language.start()):
            try:
                answers.append(one.masks(generated, drafts).tolist())
            except InternalError:
                answers.append("does not keep to it")
        assert answers[0] == answers[1]


def rolled_back(self: GrammarState, length: int) -> None:
    """As the library does it, which keeps the mask of a text that was left."""
    self._matcher.rollback(len(self._path) - length)
    del self._path[length:]


@pytest.mark.planted
@pytest.mark.parametrize("bug", ["not advanced", "not rolled back", "rolled back by the library"])
def test_planted_bugs_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "regex"
    if bug == "not rolled back":
        monkeypatch.setattr(GrammarState, "_go_back", lambda self, length: None)
    elif bug == "rolled back by the library":
        monkeypatch.setattr(GrammarState, "_go_back", rolled_back)
        name = "alike in the middle"
    else:
        right = GrammarState.masks

        def stuck(self: GrammarState, generated: list[int], drafts: tuple[int, ...] = ()) -> Mask:
            return np.repeat(right(self, generated), len(drafts) + 1, axis=0)

        monkeypatch.setattr(GrammarState, "masks", stuck)
    with pytest.raises((AssertionError, InternalError)):
        test_every_row_of_every_proposal_is_correct(name)


def test_tokens_without_text_are_masked() -> None:
    state = grammars().start(StructuredOutputs(regex=".*"))
    (row,) = state.masks([])
    assert tokens_of(row) == set(range(VOCAB)) - {OTHER}


def test_padding_of_the_vocabulary_is_masked() -> None:
    state = grammars(VOCAB + 5).start(StructuredOutputs(regex=".*"))
    (row,) = state.masks([])
    assert row.shape == (VOCAB + 5,)
    assert not row[OTHER:].any()


def test_a_narrower_model_output_has_fewer_allowed_tokens() -> None:
    state = grammars(4).start(StructuredOutputs(regex="(abc|ba)+"))
    (row,) = state.masks([])
    assert tokens_of(row) == {TOKENS.index("a"), TOKENS.index("b")}


def test_tokens_breaking_the_structure_are_an_internal_error() -> None:
    state = LANGUAGES["regex"].start()
    with pytest.raises(InternalError, match="violate"):
        state.masks([TOKENS.index("1")])
    assert tokens_of(state.masks([])[0]) == LANGUAGES["regex"].allowed(())


def test_a_text_is_checked_against_the_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "_PART", 2)
    language = LANGUAGES["regex"]
    state, wrong = language.start(), TOKENS.index("1")
    whole = max(itertools.islice(paths(language), 50), key=len)
    assert len(whole) > 2
    for path in (whole[:count] for count in range(len(whole) + 1)):
        assert state.follows(path, math.inf)
        assert state.follows([*path, wrong], math.inf) is (
            wrong in tokens_of(language.start().masks(path)[0])
        )
    with pytest.raises(InvalidArgumentError, match="too long"):
        state.follows(whole, until=state.clock() - 1)
    assert language.agrees(state.masks(whole[:1])[0], whole[:1])


def test_a_structure_leaving_no_token_names_its_field() -> None:
    """The alphabet lacks the only letter that may follow."""
    state = grammars().start(StructuredOutputs(regex="ax"))
    with pytest.raises(InvalidArgumentError, match=r"structured_outputs\.regex: leaves no token"):
        state.masks([TOKENS.index("a")])


def test_rows_end_at_a_dead_end_without_side_effects() -> None:
    """After "b" only a letter may come that no token has. The text may still go on otherwise."""
    wanted = StructuredOutputs(regex="c(ab|bx)")
    state, c, b = grammars().start(wanted), TOKENS.index("c"), TOKENS.index("b")
    for generated, drafts in (([c], [b]), ([], [c, b]), ([], [c, b, c])):
        for _ in range(2):
            rows = state.masks(generated, drafts)
            assert len(rows) == 2 - len(generated)
            for i, row in enumerate(rows):
                assert row.tolist() == grammars().start(wanted).masks([*generated, *drafts[:i]])[0].tolist()
            with pytest.raises(InvalidArgumentError, match="leaves no token"):
                state.masks([c, b])
        fresh = grammars().start(wanted)
        for own in ([], [c], [c, TOKENS.index("a")]):
            assert state.masks(own).tolist() == fresh.masks(own).tolist()


def test_a_dead_end_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time would take the whole text: a draft asks at every step, and at every branch."""
    state = grammars().start(StructuredOutputs(regex="c(ab|bx)"))
    tokens = [TOKENS.index(letter) for letter in "cb"]
    assert len(state.masks(tokens[:1], tokens[1:])) == 1
    take = GrammarState._take

    def walk(self: GrammarState, token_id: int) -> bool:
        assert token_id != tokens[1], "it was followed again"
        return take(self, token_id)

    with monkeypatch.context() as patched:
        patched.setattr(GrammarState, "_take", walk)
        assert len(state.masks(tokens[:1], tokens[1:])) == 1
        for drafts in ([], tokens):
            with pytest.raises(InvalidArgumentError, match="leaves no token"):
                state.masks(tokens, drafts)
    assert state.masks(tokens[:1]).any()


class Timed:
    """A state whose tokens and rows take so many seconds each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, token: float, row: float) -> None:
        self.now = 0.0
        self.spends(monkeypatch, "_take", token)
        self.spends(monkeypatch, "_fill", row)
        monkeypatch.setattr(state_module, "_PART", 2)
        self.state = grammars(clock=lambda: self.now).start(StructuredOutputs(regex="a*"))

    def spends(self, monkeypatch: pytest.MonkeyPatch, name: str, seconds: float) -> None:
        method = getattr(GrammarState, name)

        def slow(*of: object) -> object:
            self.now += seconds
            return method(*of)

        monkeypatch.setattr(GrammarState, name, slow)


def test_a_too_slow_mask_ends_the_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    a = TOKENS.index("a")
    for drafts in ([], [a]):
        with monkeypatch.context() as patched:
            timed = Timed(patched, 0.0, 0.6)
            with pytest.raises(InvalidArgumentError, match="takes too long to follow"):
                timed.state.masks([a], drafts)


@pytest.mark.parametrize(
    ("token", "row", "rows"), [(0.3, 0.0, 3), (0.0, 0.2, 3), (0.6, 0.0, 2), (0.1, 0.0, 5)]
)
def test_too_slow_masks_end_the_rows(
    token: float, row: float, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In plain decoding each of them would have the time to itself."""
    a = TOKENS.index("a")
    timed = Timed(monkeypatch, token, row)
    assert len(timed.state.masks([], [a] * 4)) == rows
    assert timed.now < 2 * limits.MAX_STRUCTURE_SECONDS


@pytest.mark.parametrize(("seconds", "rows"), [(-0.3, 1), (0.0, 1), (0.1, 1), (0.3, 2), (0.5, 3)])
def test_rows_end_with_the_time_of_all_sequences(
    seconds: float, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the first, which plain decoding needs as well."""
    a = TOKENS.index("a")
    timed = Timed(monkeypatch, 0.0, 0.2)
    assert len(timed.state.masks([], [a] * 4, seconds)) == rows


def test_a_text_followed_anew_gets_the_follow_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is longer than that of one round's masks."""
    text = [TOKENS.index("a")] * 30
    timed = Timed(monkeypatch, token=0.9 * limits.MAX_FOLLOW_SECONDS / len(text), row=0.4)
    assert tokens_of(timed.state.masks(text)[0]) >= {END, text[0]}
    assert timed.now > limits.MAX_STRUCTURE_SECONDS
    slow = Timed(monkeypatch, token=1.2 * limits.MAX_FOLLOW_SECONDS / len(text), row=0.0)
    with pytest.raises(InvalidArgumentError, match="takes too long to follow"):
        slow.state.masks(text)


def test_lastingly_slow_masks_end_the_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is within a round's bound, but all sequences of the worker wait for it."""
    now, asked, right = 0.0, 0, GrammarState._fill

    def slow(self: GrammarState, row: Mask) -> None:
        nonlocal now, asked
        now, asked = now + 0.1, asked + 1
        right(self, row)

    monkeypatch.setattr(GrammarState, "_fill", slow)
    state = grammars(clock=lambda: now).alone(StructuredOutputs(regex="[ab]{1,99}"))
    a = TOKENS.index("a")
    for length in range(7):  # half a second, and 0.02 more for each
        state.masks([a] * length)
    for _ in range(3):
        with pytest.raises(InvalidArgumentError, match="takes too long to follow"):
            state.masks([a] * 7)
    assert asked == 7, "nothing is tried after that"


def test_occasionally_slow_masks_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked, right = 0.0, 0, GrammarState._fill

    def uneven(self: GrammarState, row: Mask) -> None:
        nonlocal now, asked
        asked += 1
        now += 0.4 if asked % 30 == 0 else 0.001
        right(self, row)

    monkeypatch.setattr(GrammarState, "_fill", uneven)
    state = grammars(clock=lambda: now).alone(StructuredOutputs(regex="[ab]{1,99}"))
    a = TOKENS.index("a")
    for length in range(90):
        state.masks([a] * length)
    assert asked == 90


@pytest.mark.parametrize("name", LANGUAGES)
def test_forced_tokens_are_the_only_ones_allowed(name: str) -> None:
    language, found = LANGUAGES[name], 0
    shared = language.start()
    for path in paths(language):
        tokens = shared.forced(path)
        assert tokens == language.start().forced(path)
        found += len(tokens)
        for i, token in enumerate(tokens):
            (row,) = language.start().masks((*path, *tokens[:i]))
            assert tokens_of(row) == {token}
    assert found or name not in ("one text", "json")
