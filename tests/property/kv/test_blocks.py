"""Block pool and block tables against a model that keeps every sequence's contents as a plain list.

The machine writes values into a dictionary of slots exactly as a tensor owner would, and after every
step each table must read back its own list. Any slot with two writers, any block freed too early and
any forgotten copy shows up as a wrong value; any block freed too late as a pool that is too full.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from paceline.core.clock import ManualClock
from paceline.core.errors import PacelineError, ResourceExhaustedError
from paceline.kv import BlockPool, BlockTable, CopyBlock, Leases
from tests.property.machines import machine_settings

SETTINGS = machine_settings(80, 30)


class BlockMachine(RuleBasedStateMachine):
    """Random open, feed, roll back, share and close of up to five sequences."""

    table_class: type[BlockTable] = BlockTable

    @initialize(num_blocks=st.integers(1, 12), block_size=st.sampled_from([1, 2, 3, 4, 40]))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.memory: dict[int, int] = {}
        self.live: list[tuple[BlockTable, list[int]]] = []
        self.values = itertools.count()

    def copy(self, copies: Sequence[CopyBlock]) -> None:
        size = self.pool.block_size
        for pair in copies:
            for offset in range(size):
                value = self.memory.get(pair.source * size + offset)
                if value is not None:
                    self.memory[pair.destination * size + offset] = value

    @precondition(lambda self: len(self.live) < 5)
    @rule()
    def open(self) -> None:
        self.live.append((self.table_class(self.pool), []))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), n=st.integers(0, 10), committed=st.integers(0, 10))
    def feed(self, data: st.DataObject, n: int, committed: int) -> None:
        table, expected = data.draw(st.sampled_from(self.live))
        committed = min(n, committed)
        before = (table.length, table.blocks, table.reserved, self.pool.free_blocks)
        needed = table.blocks_needed(n)
        if needed > self.pool.free_blocks:
            with pytest.raises(ResourceExhaustedError):
                table.reserve(n)
            assert before == (table.length, table.blocks, table.reserved, self.pool.free_blocks)
            return
        self.copy(table.reserve(n))
        assert before[3] - self.pool.free_blocks <= needed
        # A rejected draft is written and never committed, so write all that is reserved.
        for slot in table.slots(table.length, table.length + n):
            self.memory[slot] = next(self.values)
        written = [self.memory[s] for s in table.slots(table.length, table.length + committed)]
        table.commit(committed)
        expected += written

    @precondition(lambda self: self.live)
    @rule(data=st.data(), fraction=st.floats(0, 1))
    def truncate(self, data: st.DataObject, fraction: float) -> None:
        table, expected = data.draw(st.sampled_from(self.live))
        length = round(fraction * table.length)
        table.truncate_to(length)
        del expected[length:]
        assert table.reserved == 0
        assert len(table.blocks) == -(-length // self.pool.block_size)

    def full(self) -> list[tuple[BlockTable, list[int]]]:
        """The tables with a full block."""
        return [it for it in self.live if it[0].length >= self.pool.block_size]

    @precondition(lambda self: len(self.live) < 5 and self.full())
    @rule(data=st.data(), left=st.integers(0, 2), back=st.integers(0, 3))
    def begin_with_shared_blocks(self, data: st.DataObject, left: int, back: int) -> None:
        """`back`: entries to leave again, so that the new table ends within a shared block."""
        table, expected = data.draw(st.sampled_from(self.full()))
        size = self.pool.block_size
        full = max(1, table.length // size - left)
        free = self.pool.free_blocks
        other = self.table_class(self.pool)
        other.share(table.blocks[:full])
        assert self.pool.free_blocks == free
        length = max(0, full * size - back)
        other.truncate_to(length)
        self.live.append((other, expected[:length]))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.live) - 1))
        table, _ = self.live.pop(index)
        table.free()

    @invariant()
    def tables_read_back_their_own_values(self) -> None:
        for table, expected in getattr(self, "live", []):
            assert table.length == len(expected)
            slots = table.slots(0, table.length)
            assert [self.memory.get(slot) for slot in slots] == expected
            start = table.contiguous_start(table.length)
            consecutive = slots == list(range(slots[0], slots[0] + len(slots))) if slots else False
            assert (start is not None) == consecutive
            assert start is None or start == slots[0]

    @invariant()
    def no_slot_has_two_writers(self) -> None:
        writable: set[int] = set()
        readable = [set(t.slots(0, t.length)) for t, _ in getattr(self, "live", [])]
        for i, (table, _) in enumerate(getattr(self, "live", [])):
            own = set(table.slots(table.length, table.length + table.reserved))
            assert not own & writable
            assert not any(own & other for j, other in enumerate(readable) if j != i)
            writable |= own

    @invariant()
    def every_block_is_free_or_held(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        held = [block for table, _ in self.live for block in table.blocks]
        assert self.pool.free_blocks + self.pool.used_blocks == self.pool.num_blocks
        assert self.pool.used_blocks == len(set(held))
        assert all(self.pool.count(block) == held.count(block) for block in range(self.pool.num_blocks))

    def teardown(self) -> None:
        for table, _ in getattr(self, "live", []):
            table.free()
        if hasattr(self, "pool"):
            assert self.pool.used_blocks == 0


def test_tables_behave_like_lists() -> None:
    run_machine(BlockMachine, settings=SETTINGS)


class FreesTooFew(BlockTable):
    """Keeps one block too many when it truncates."""

    def truncate_to(self, length: int) -> None:
        kept = -(-length // self._pool.block_size) + 1
        while len(self._blocks) > kept:
            self._pool.release(self._blocks.pop())
        self._contiguous = min(self._contiguous, len(self._blocks))
        self._length, self._reserved = length, 0


class FreesTooMany(BlockTable):
    """Rounds the number of kept blocks down."""

    def truncate_to(self, length: int) -> None:
        kept = length // self._pool.block_size
        while len(self._blocks) > kept:
            self._pool.release(self._blocks.pop())
        self._contiguous = min(self._contiguous, kept)
        self._length, self._reserved = length, 0


class SharesThePartialBlock(BlockTable):
    """Forgets that a block with several holders must not be written."""

    def _tail_is_shared(self) -> bool:
        return False


class ForgetsTheCopy(BlockTable):
    """Replaces the shared tail without asking for its contents."""

    def reserve(self, n: int) -> list[CopyBlock]:
        super().reserve(n)
        return []


@pytest.mark.planted
@pytest.mark.parametrize(
    "broken", [FreesTooFew, FreesTooMany, SharesThePartialBlock, ForgetsTheCopy], ids=lambda c: c.__name__
)
def test_a_planted_block_bug_is_caught(broken: type[BlockTable]) -> None:
    machine = type("Planted", (BlockMachine,), {"table_class": broken})
    thorough = settings(SETTINGS, max_examples=1500, report_multiple_bugs=False, phases=settings().phases[:3])
    with pytest.raises((AssertionError, IndexError, ValueError, PacelineError)):
        run_machine(machine, settings=thorough)


class LeaseMachine(RuleBasedStateMachine):
    """Leases against a dictionary of last renewals."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.leases: Leases[int] = Leases(self.clock, 8.0)
        self.renewed: dict[int, float] = {}

    @rule(key=st.integers(0, 5))
    def renew(self, key: int) -> None:
        self.leases.renew(key)
        self.renewed.pop(key, None)
        self.renewed[key] = self.clock.now

    @rule(key=st.integers(0, 5))
    def end(self, key: int) -> None:
        self.leases.end(key)
        self.renewed.pop(key, None)

    @rule(seconds=st.integers(0, 10))
    def wait(self, seconds: int) -> None:
        self.clock.advance(seconds)

    @invariant()
    def agrees(self) -> None:
        assert self.leases.expired() == [k for k, t in self.renewed.items() if self.clock.now - t >= 8]
        assert list(self.leases) == list(self.renewed)


def test_leases_behave_like_a_dictionary() -> None:
    run_machine(LeaseMachine, settings=SETTINGS)
