"""The prefix index against a list of what every block should hold, and one for the order of eviction.

Sequences over two letters and two salts meet each other's prefixes all the time. Entries are written as
their tokens, proposals included, so that a block in the index which holds anything but the committed tokens
of its chain is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from paceline.core.errors import PacelineError
from paceline.kv import BlockPool, BlockTable, CachedPrefix, PrefixIndex
from paceline.kv.prefix import first_key, next_key
from tests.property.kv.test_blocks import SETTINGS

SIZE = 3
letters = st.integers(0, 1)


class Fed:
    """One sequence: what it has committed, and what its entries hold."""

    def __init__(self, index: PrefixIndex, salt: str) -> None:
        self.salt = salt
        self.table = BlockTable(index.pool)
        self.prefix = CachedPrefix(index, self.table, salt)
        self.ledger: list[int] = []
        self.held_blocks: list[int] = []
        self.offered = 0
        """Blocks found in the index or offered to it: none is offered again when its like is evicted."""


class PrefixMachine(RuleBasedStateMachine):
    """Up to four sequences in a pool that is too small for them."""

    prefix_class: type[CachedPrefix] = CachedPrefix

    @initialize(num_blocks=st.integers(3, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, SIZE)
        self.index = PrefixIndex(self.pool)
        self.memory: dict[int, int] = {}
        self.live: list[Fed] = []
        self.committed: dict[tuple[str, tuple[int, ...]], None] = {}
        """Every prefix of whole blocks that was ever committed, by salt."""
        self.model: dict[int, tuple[str, tuple[int, ...]]] = {}
        """Block to the chain it is entered under."""
        self.idle: list[int] = []
        """Blocks of the model that nobody holds, longest idle first."""

    # ---- the model -------------------------------------------------------------------------------

    def chain(self, of: Fed, blocks: int) -> tuple[str, tuple[int, ...]]:
        return of.salt, tuple(of.ledger[: blocks * SIZE])

    def known(self, of: Fed, most: int) -> list[int]:
        """The blocks that a sequence must find."""
        by_chain = {chain: block for block, chain in self.model.items()}
        found = []
        while (len(found) + 1) * SIZE <= most and (chain := self.chain(of, len(found) + 1)) in by_chain:
            found.append(by_chain[chain])
        return found

    def moved(self, of: Fed) -> None:
        """After anything that may take or release blocks: who is idle, and what was evicted for it."""
        before, after = of.held_blocks, list(of.table.blocks)
        holders = [block for one in self.live if one is not of for block in one.table.blocks]
        for block in reversed(before):
            if block not in after and block not in holders and block in self.model:
                self.idle.append(block)
        for block in after:
            if block in before:
                continue
            if block in self.idle and self.pool.is_kept(block):
                self.idle.remove(block)
        # What was needed beyond the blank ones came from the longest idle.
        gone = [block for block in self.idle if not self.pool.is_kept(block)]
        assert gone == self.idle[: len(gone)], "not the longest idle ones were evicted"
        for block in gone:
            self.idle.remove(block)
            del self.model[block]
        of.held_blocks = after

    def discarded_by_writing(self, held_before: list[int]) -> None:
        for block in held_before:
            if block in self.model and not self.pool.is_kept(block):
                del self.model[block]

    # ---- rules -----------------------------------------------------------------------------------

    @precondition(lambda self: len(self.live) < 4)
    @rule(ledger=st.lists(letters, min_size=1, max_size=14), salt=st.sampled_from(["", "a"]))
    def open(self, ledger: list[int], salt: str) -> None:
        self.begin(ledger, salt)

    @precondition(lambda self: 0 < len(self.live) < 4)
    @rule(data=st.data(), token=letters)
    def open_one_that_goes_on_like_another(self, data: st.DataObject, token: int) -> None:
        other = data.draw(st.sampled_from(self.live))
        self.begin([*other.ledger[:14], token], other.salt)

    def begin(self, ledger: list[int], salt: str) -> None:
        one = Fed(self.index, salt)
        one.prefix = self.prefix_class(self.index, one.table, salt)
        one.ledger = ledger
        expected = self.known(one, len(ledger) - 1)
        found = one.prefix.extend(ledger[:-1])
        assert found == one.table.length == len(expected) * SIZE
        assert list(one.table.blocks) == expected
        one.offered = len(expected)
        self.live.append(one)
        self.moved(one)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), proposed=st.lists(letters, max_size=4), accepted=st.integers(0, 4), token=letters)
    def round(self, data: st.DataObject, proposed: list[int], accepted: int, token: int) -> None:
        """Feed what is missing and a proposal, commit a part of it, and roll back."""
        self.feed(data.draw(st.sampled_from(self.live)), proposed, accepted, token)

    def feed(self, of: Fed, proposed: list[int], accepted: int, token: int) -> None:
        feed = [*of.ledger, *proposed][of.table.length :]
        if of.table.blocks_needed(len(feed)) > self.pool.free_blocks:
            return
        for pair in of.table.reserve(len(feed)):
            for offset in range(SIZE):
                self.memory[pair.destination * SIZE + offset] = self.memory.get(
                    pair.source * SIZE + offset, -1
                )
        before = of.held_blocks
        self.moved(of)
        self.discarded_by_writing(before)
        for slot, fed in zip(of.table.slots(of.table.length, of.table.length + len(feed)), feed, strict=True):
            self.memory[slot] = fed
        of.table.commit(len(feed))
        self.enter(of)
        grown = proposed[: min(accepted, len(proposed))]
        length = len(of.ledger) + len(grown)
        of.ledger += [*grown, token]
        of.table.truncate_to(length)
        of.prefix.cut_to(length)
        of.offered = min(of.offered, length // SIZE)
        self.moved(of)

    def enter(self, of: Fed) -> None:
        full = min(len(of.ledger), of.table.length) // SIZE
        for i in range(of.offered + 1, full + 1):
            chain, block = self.chain(of, i), of.table.blocks[i - 1]
            self.committed[chain] = None
            if chain not in self.model.values() and block not in self.model:
                self.model[block] = chain
        of.offered = max(of.offered, full)
        of.prefix.enter(of.ledger)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), fraction=st.floats(0, 1), token=letters)
    def go_back(self, data: st.DataObject, fraction: float, token: int) -> None:
        """The ledger is another one than the worker was told before."""
        of = data.draw(st.sampled_from(self.live))
        length = round(fraction * min(of.table.length, len(of.ledger) - 1))
        of.ledger[length:] = [token]
        of.table.truncate_to(length)
        of.prefix.cut_to(length)
        of.offered = min(of.offered, length // SIZE)
        self.moved(of)
        self.feed(of, [], 0, token)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        of = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        of.table.free()
        self.moved(of)

    # ---- what must hold ----------------------------------------------------------------------------

    @invariant()
    def the_index_is_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert set(dict(self.index.items()).values()) == set(self.model)
        for block, (salt, tokens) in self.model.items():
            assert (salt, tokens) in self.committed
            assert [self.memory[block * SIZE + i] for i in range(SIZE)] == list(tokens[-SIZE:])
        self.index.check_integrity()

    @invariant()
    def free_and_used_blocks_are_all(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        held = [block for one in self.live for block in one.table.blocks]
        assert self.pool.used_blocks == len(set(held))
        assert self.pool.free_blocks + self.pool.used_blocks == self.pool.num_blocks
        assert self.pool.cached_blocks == len(self.idle)
        assert all(self.pool.count(block) == held.count(block) for block in range(self.pool.num_blocks))
        assert all(block in self.model for block in held if held.count(block) > 1)

    @invariant()
    def every_entry_holds_its_token(self) -> None:
        for one in getattr(self, "live", []):
            entries = [self.memory[slot] for slot in one.table.slots(0, one.table.length)]
            assert entries == one.ledger[: one.table.length]


def test_the_index_behaves_like_lists() -> None:
    run_machine(PrefixMachine, settings=SETTINGS)


class EntersProposals(CachedPrefix):
    """Takes every entry for a committed one."""

    def enter(self, tokens: Sequence[int]) -> None:
        super().enter([*tokens, *([0] * (self.table.length - len(tokens)))])


class IgnoresTheSalt(CachedPrefix):
    """Shares between tenants."""

    def __init__(self, index: PrefixIndex, table: BlockTable, salt: str) -> None:
        super().__init__(index, table, "")


class ForgetsThePast(CachedPrefix):
    """Finds a block by its own tokens alone."""

    def _next_key(self, tokens: Sequence[int]) -> bytes:
        return next_key(first_key(self.salt), tokens)


class ForgetsTheRollback(CachedPrefix):
    """Goes on with the keys of entries that are gone."""

    def cut_to(self, length: int) -> None:
        pass


@pytest.mark.planted
@pytest.mark.parametrize(
    "broken", [EntersProposals, IgnoresTheSalt, ForgetsThePast, ForgetsTheRollback], ids=lambda c: c.__name__
)
def test_a_planted_prefix_bug_is_caught(broken: type[CachedPrefix]) -> None:
    plant(PrefixMachine, prefix_class=broken)


@pytest.mark.planted
@pytest.mark.parametrize(
    ("method", "bug"),
    [("_own_tail", lambda self: None), ("_tail_is_shared", lambda self: False)],
    ids=["writes to a kept block", "writes to a shared block"],
)
def test_a_planted_table_bug_is_caught(
    monkeypatch: pytest.MonkeyPatch, method: str, bug: Callable[..., Any]
) -> None:
    monkeypatch.setattr(BlockTable, method, bug)
    plant(PrefixMachine)


@pytest.mark.planted
def test_a_planted_eviction_order_bug_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def evict(self: BlockPool, n: int) -> None:
        for _ in range(min(n, len(self._idle))):
            self.discard(next(reversed(self._idle)))

    monkeypatch.setattr(BlockPool, "_evict", evict)
    plant(PrefixMachine)


def plant(machine: type[PrefixMachine], **changes: Any) -> None:
    planted = type("Planted", (machine,), changes)
    thorough = settings(SETTINGS, max_examples=1500, report_multiple_bugs=False, phases=[Phase.generate])
    with pytest.raises((AssertionError, IndexError, KeyError, ValueError, PacelineError)):
        run_machine(planted, settings=thorough)
