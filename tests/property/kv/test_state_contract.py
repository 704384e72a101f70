"""What every state of a sequence must do: random histories against plain lists of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_worker.drafters.ngram import NgramScorer
from draft_worker.drafters.tokens import FixedScorer, TokenState, TokenStates
from paceline.engine.state.interface import SequenceState, SequenceStates
from paceline.engine.state.paged import PagedState, PagedStates
from paceline.kv import BlockPool, BlockTable, Branching

BLOCK = 4
MakeStates = Callable[[BlockPool], SequenceStates]
ALPHABET = st.integers(0, 1)
"""Two tokens, so that texts begin alike."""
Tokens = st.lists(ALPHABET, min_size=1, max_size=9)
STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["feed", "give up", "truncate", "publish", "lookup", "adopt", "withdraw", "restart"]),
        Tokens,
        st.integers(0, 12),
    ),
    max_size=40,
)


def table_of(state: SequenceState) -> BlockTable:
    assert isinstance(state, PagedState)
    return state.table


class One:
    """A state, and the tokens its entries stand for."""

    def __init__(self, states: SequenceStates, salt: str) -> None:
        self.states, self.salt = states, salt
        self.restart()

    def restart(self) -> None:
        self.state: SequenceState = self.states.new(self.salt)
        self.tokens: list[int] = []


class World:
    """Three sequences of one pool, the last with a salt of its own, and what every slot holds."""

    def __init__(self, make: MakeStates) -> None:
        self.pool = BlockPool(64, BLOCK)
        self.states = make(self.pool)
        self.slots: dict[int, int] = {}
        self.published: set[tuple[str, tuple[int, ...]]] = set()
        self.ones = [One(self.states, salt) for salt in ("a", "a", "b")]

    def read(self, state: SequenceState) -> list[int]:
        """The tokens that the state's entries were made of."""
        table = table_of(state)
        return [self.slots[slot] for slot in table.slots(0, table.length)]

    def write(self, one: One, tokens: list[int], *, commit: bool) -> None:
        table = table_of(one.state)
        for copy in table.reserve(len(tokens)):
            for i in range(BLOCK):
                if copy.source * BLOCK + i in self.slots:
                    self.slots[copy.destination * BLOCK + i] = self.slots[copy.source * BLOCK + i]
        for slot, token in zip(table.slots(table.length, table.length + len(tokens)), tokens, strict=True):
            self.slots[slot] = token
        if commit:
            table.commit(len(tokens))
            one.tokens += tokens
        else:
            one.state.truncate_to(table.length)

    def adopt(self, one: One, tokens: list[int], kept: int) -> None:
        """A branch beside the sequence takes its place."""
        table = table_of(one.state)
        kept = min(kept, table.length)
        region = Branching(table, len(tokens))
        branch = region.branch(kept)
        branch.reserve(len(tokens))
        branch.commit(len(tokens))
        self.slots |= zip(branch.own_slots(), tokens, strict=True)
        region.free()
        del one.tokens[one.state.truncate_to(kept) :]
        self.write(one, tokens, commit=True)

    def step(self, which: int, what: str, tokens: list[int], number: int) -> None:
        one = self.ones[which]
        state = one.state
        if what == "feed":
            self.write(one, tokens, commit=True)
            if number % 2:
                state.mark_finite()
        elif what == "give up":
            self.write(one, tokens, commit=False)
        elif what == "truncate":
            reached = state.truncate_to(min(number, state.length))
            assert reached <= number
            del one.tokens[reached:]
        elif what == "publish":
            state.publish(one.tokens)
            ends = range(BLOCK, len(one.tokens) + 1, BLOCK)
            self.published |= {(one.salt, tuple(one.tokens[:end])) for end in ends}
        elif what == "lookup":
            text = [*one.tokens, *tokens]
            found = state.lookup(text)
            one.tokens = text[: len(one.tokens) + found]
            assert not found or (one.salt, tuple(one.tokens)) in self.published
        elif what == "adopt":
            self.adopt(one, tokens, number)
        elif what == "withdraw":
            state.withdraw(min(number, state.length))
        else:
            state.free()
            one.restart()

    def check(self) -> None:
        for one in self.ones:
            assert one.state.length == len(one.tokens)
            assert self.read(one.state) == one.tokens
            assert one.state.finite_length <= one.state.length
        self.pool.check_integrity()
        if self.states.prefix_index is not None:
            self.states.prefix_index.check_integrity()


class TokenWorld(World):
    """The same of states that are the tokens themselves."""

    def read(self, state: SequenceState) -> list[int]:
        assert isinstance(state, TokenState)
        return state.token_ids

    def write(self, one: One, tokens: list[int], *, commit: bool) -> None:
        assert isinstance(one.state, TokenState)
        one.state.extend(tokens if commit else [])
        one.tokens += tokens if commit else []

    def adopt(self, one: One, tokens: list[int], kept: int) -> None:
        del one.tokens[one.state.truncate_to(min(kept, one.state.length)) :]
        self.write(one, tokens, commit=True)


class NgramWorld(TokenWorld):
    """The same of counts: they are those of a new text."""

    def check(self) -> None:
        super().check()
        for one in self.ones:
            state = one.state
            assert isinstance(state, TokenState)
            assert isinstance(state.scorer, NgramScorer)
            fresh = NgramScorer(2, window=5)
            fresh.count(one.tokens, len(one.tokens))
            assert state.scorer._followers == fresh._followers


def paged_world() -> World:
    return World(lambda pool: PagedStates(pool, prefix_cache=True))


WORLDS: dict[str, Callable[[], World]] = {
    "paged": paged_world,
    "tokens": lambda: TokenWorld(lambda _: TokenStates(FixedScorer)),
    "n-grams": lambda: NgramWorld(lambda _: TokenStates(lambda: NgramScorer(2, window=5))),
}


def run(world: World, steps: Any) -> None:
    for step in steps:
        if step[1] == "feed" and world.pool.free_blocks < 12:
            continue
        world.step(*step)
        world.check()
    for one in world.ones:
        one.state.free()
    assert world.pool.used_blocks == 0
    assert world.pool.free_blocks == world.pool.num_blocks


@pytest.mark.parametrize("name", WORLDS)
@given(steps=STEPS)
@settings(deadline=None)
def test_a_state_holds_its_tokens(name: str, steps: Any) -> None:
    run(WORLDS[name](), steps)


def test_a_paged_state_finds_published_blocks() -> None:
    """By its salt, in whole blocks, after the sequence that computed it has ended."""
    world = paged_world()
    text = [0, 1, 1, 0, 1, 0, 0, 1, 1]
    world.step(0, "feed", text, 0)
    world.step(0, "publish", [], 0)
    world.step(0, "restart", [], 0)
    assert world.ones[2].state.lookup(text) == 0
    assert world.ones[1].state.lookup(text) == 8


class Forgetful(PagedState):
    """Keeps what others may find when its entries are replaced."""

    def truncate_to(self, length: int) -> int:
        self.table.truncate_to(length)
        return length


class Leaking(PagedState):
    """Does not give its blocks back."""

    def free(self) -> None:
        pass


class Unsalted(PagedStates):
    """Lets everybody find everything."""

    def new(self, salt: str) -> PagedState:
        return super().new("")


def states_of(cls: type[PagedState]) -> MakeStates:
    class Made(PagedStates):
        def new(self, salt: str) -> PagedState:
            made = super().new(salt)
            return cls(made.table, made._prefix)

    return lambda pool: Made(pool, prefix_cache=True)


@pytest.mark.planted
@pytest.mark.parametrize(
    "make",
    [states_of(Forgetful), states_of(Leaking), lambda pool: Unsalted(pool, prefix_cache=True)],
    ids=["forgetful", "leaking", "unsalted"],
)
def test_a_wrong_state_breaks_the_contract(make: MakeStates) -> None:
    first, other = [0, 1, 1, 0, 1], [0, 1, 1, 1, 1]
    history = [
        (0, "feed", first, 1),
        (0, "publish", [], 0),
        (2, "lookup", first, 0),
        (0, "truncate", [], 1),
        (0, "feed", other, 0),
        (0, "publish", [], 0),
        (1, "lookup", [*first[:1], *other], 0),
    ]
    run(paged_world(), history)
    with pytest.raises(AssertionError):
        run(World(make), history)
