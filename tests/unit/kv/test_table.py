"""BlockTable: positions to slots, rollback, shared blocks."""

from __future__ import annotations

import pytest

from paceline.core.errors import ResourceExhaustedError
from paceline.kv import BlockPool, BlockTable, CopyBlock


def filled(pool: BlockPool, n: int) -> BlockTable:
    table = BlockTable(pool)
    assert table.reserve(n) == []
    table.commit(n)
    return table


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_rollback_equals_never_feeding_rejected_tokens(block_size: int) -> None:
    """After a round that accepts `a` of K drafts the cache is as if only those had ever been fed."""
    pool = BlockPool(128 // block_size, block_size)
    k = 5
    for accepted in range(k + 1):
        table = filled(pool, 13)
        table.reserve(k + 1)
        table.commit(k + 1)
        table.truncate_to(13 + 1 + accepted)
        fresh = filled(BlockPool(128 // block_size, block_size), 13 + 1 + accepted)
        assert table.length == fresh.length == 14 + accepted
        assert table.blocks == fresh.blocks
        assert table.slots(0, table.length) == fresh.slots(0, fresh.length)
        assert pool.used_blocks == -(-table.length // block_size)
        table.free()
        assert pool.used_blocks == 0
        pool.check_integrity()


def test_truncation_frees_blocks_past_the_length() -> None:
    pool = BlockPool(8, 4)
    table = filled(pool, 16)
    table.truncate_to(9)
    assert table.blocks == (0, 1, 2)
    table.truncate_to(8)
    assert table.blocks == (0, 1)
    table.truncate_to(0)
    assert table.blocks == ()


def test_truncation_takes_an_absolute_length() -> None:
    table = filled(BlockPool(4, 4), 6)
    for length in (7, -1):
        with pytest.raises(ValueError, match="cannot truncate"):
            table.truncate_to(length)
    assert table.length == 6


def test_truncating_to_the_same_length_frees_the_reservation() -> None:
    pool = BlockPool(4, 4)
    table = filled(pool, 6)
    table.reserve(9)
    assert pool.used_blocks == 4
    table.truncate_to(6)
    assert (pool.used_blocks, table.reserved) == (2, 0)


def test_a_reservation_is_all_or_nothing() -> None:
    pool = BlockPool(3, 4)
    table = filled(pool, 6)
    assert table.blocks_needed(7) == 2
    with pytest.raises(ResourceExhaustedError):
        table.reserve(7)
    assert (table.length, table.blocks, table.reserved, pool.free_blocks) == (6, (0, 1), 0, 1)


def test_only_reserved_entries_are_committed() -> None:
    table = BlockTable(BlockPool(3, 4))
    with pytest.raises(ValueError, match="cannot commit"):
        table.commit(1)
    table.reserve(3)
    table.commit(2)
    table.commit(1)
    # The block has room for a fourth entry, but nobody reserved it.
    with pytest.raises(ValueError, match="cannot commit"):
        table.commit(1)
    with pytest.raises(ValueError, match="cannot reserve"):
        table.reserve(-1)


def test_slots_follow_the_blocks() -> None:
    pool = BlockPool(8, 2)
    first, second = filled(pool, 2), filled(pool, 2)
    first.reserve(3)
    first.commit(3)
    assert first.blocks == (0, 2, 3)
    assert first.slots(0, 5) == [0, 1, 4, 5, 6]
    assert first.slots(1, 4) == [1, 4, 5]
    assert first.slots(3, 3) == []
    assert second.slots(0, 2) == [2, 3]
    with pytest.raises(ValueError, match="reach outside"):
        first.slots(0, 6)


def test_a_contiguous_table_has_a_start() -> None:
    pool = BlockPool(8, 2)
    first = filled(pool, 2)
    assert first.contiguous_start(2) == 0
    assert first.contiguous_start(0) is None
    second = filled(pool, 4)
    assert second.contiguous_start(4) == 2
    first.reserve(2)
    first.commit(2)
    assert first.blocks == (0, 3)
    assert first.contiguous_start(2) == 0
    assert first.contiguous_start(3) is None
    first.truncate_to(2)
    second.free()
    first.reserve(2)
    assert first.contiguous_start(4) == 0


def shared(pool: BlockPool, table: BlockTable, full: int) -> BlockTable:
    """A second table with the same first blocks."""
    other = BlockTable(pool)
    other.share(table.blocks[:full])
    return other


def test_full_blocks_are_shared_and_growth_is_separate() -> None:
    pool = BlockPool(8, 4)
    table = filled(pool, 10)
    other = shared(pool, table, 2)
    assert (other.blocks, other.length, other.reserved) == ((0, 1), 8, 0)
    other.reserve(2)
    other.commit(2)
    assert other.blocks == (0, 1, 3)
    assert [pool.count(block) for block in range(4)] == [2, 2, 1, 1]
    table.free()
    assert pool.used_blocks == 3
    other.free()
    assert pool.used_blocks == 0


@pytest.mark.parametrize(("entries", "reserved"), [(3, 0), (4, 1), (0, 4)])
def test_only_a_table_ending_with_a_full_block_shares(entries: int, reserved: int) -> None:
    pool = BlockPool(8, 4)
    table, other = filled(pool, 8), filled(pool, entries)
    other.reserve(reserved)
    with pytest.raises(ValueError, match="entries end with a block"):
        other.share(table.blocks)
    assert pool.count(0) == 1


def test_a_shared_partial_block_is_copied_before_writing() -> None:
    """Truncating into a shared prefix leaves a shared tail; whoever writes first gets a copy."""
    pool = BlockPool(8, 4)
    table = filled(pool, 8)
    other = shared(pool, table, 2)
    table.truncate_to(6)
    other.truncate_to(5)
    assert table.blocks_needed(2) == 1
    assert table.reserve(2) == [CopyBlock(1, 2)]
    assert (table.blocks, other.blocks) == ((0, 2), (0, 1))
    assert other.reserve(2) == []  # the only holder left
    assert not set(table.slots(6, 8)) & set(other.slots(0, 7))
    pool.check_integrity()


def test_a_full_pool_refuses_the_copy_of_a_shared_tail() -> None:
    pool = BlockPool(2, 4)
    table = filled(pool, 8)
    other = shared(pool, table, 2)
    table.truncate_to(6)
    with pytest.raises(ResourceExhaustedError):
        table.reserve(1)
    assert table.blocks == other.blocks == (0, 1)


def test_the_only_holder_discards_a_kept_block_on_write() -> None:
    """It needs no other block: a sequence alone in a full pool must be able to go back."""
    pool = BlockPool(2, 4)
    given_up: list[int] = []
    pool.on_discard = given_up.append
    table = filled(pool, 8)
    pool.keep(0)
    pool.keep(1)
    table.truncate_to(6)
    assert table.reserve(0) == []
    assert given_up == []
    assert table.reserve(2) == []
    assert given_up == [1]
    assert (pool.is_kept(0), pool.is_kept(1)) == (True, False)


def test_a_table_frees_itself_as_a_context_manager() -> None:
    pool = BlockPool(4, 4)
    with filled(pool, 9) as table:
        assert (pool.used_blocks, table.pool) == (3, pool)
    assert pool.used_blocks == 0
