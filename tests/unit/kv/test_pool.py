"""BlockPool: holders of blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.core.errors import InternalError, ResourceExhaustedError
from paceline.kv import BlockPool
from paceline.kv.pool import EVICTED_SHARE


def test_blocks_are_allocated_in_ascending_order() -> None:
    pool = BlockPool(6, 4)
    assert pool.allocate_many(3) == [0, 1, 2]
    pool.release(1)
    assert pool.allocate() == 1
    assert (pool.used_blocks, pool.free_blocks, pool.num_blocks) == (3, 3, 6)


def test_a_sequence_grows_next_to_its_end_where_possible() -> None:
    pool = BlockPool(8, 4)
    held = pool.allocate_many(5)
    for block in held[:3]:
        pool.release(block)
    assert pool.allocate_many(3, after=4) == [5, 6, 7]
    assert pool.allocate(after=7) == 0  # past the end there is nothing
    pool.check_integrity()


def test_a_block_allocated_out_of_order_is_given_once() -> None:
    pool = BlockPool(3, 1)
    assert pool.allocate(after=0) == 1
    pool.release(1)
    assert pool.allocate(after=0) == 1
    assert sorted(pool.allocate_many(2)) == [0, 2]
    pool.check_integrity()


def test_a_failed_allocation_takes_nothing() -> None:
    pool = BlockPool(3, 1)
    pool.allocate()
    with pytest.raises(ResourceExhaustedError):
        pool.allocate_many(3)
    assert pool.free_blocks == 2
    assert pool.allocate_many(2) == [1, 2]
    with pytest.raises(ResourceExhaustedError):
        pool.allocate()


def test_a_block_is_free_when_its_last_holder_releases_it() -> None:
    pool = BlockPool(2, 1)
    block = pool.allocate()
    pool.retain(block)
    pool.release(block)
    assert pool.count(block) == 1
    pool.release(block)
    assert (pool.count(block), pool.free_blocks) == (0, 2)


def kept(pool: BlockPool, n: int) -> list[int]:
    """Blocks that become cached when they are released."""
    blocks = pool.allocate_many(n)
    for block in blocks:
        pool.keep(block)
    return blocks


def test_a_kept_block_is_free_and_can_be_reused() -> None:
    pool = BlockPool(4, 1)
    (block,) = kept(pool, 1)
    assert (pool.used_blocks, pool.cached_blocks) == (1, 0)
    pool.release(block)
    assert (pool.free_blocks, pool.cached_blocks, pool.is_kept(block)) == (4, 1, True)
    pool.retain(block)
    assert (pool.free_blocks, pool.cached_blocks, pool.count(block)) == (3, 0, 1)
    pool.check_integrity()


def test_blank_blocks_are_allocated_before_cached_ones() -> None:
    pool = BlockPool(4, 1)
    for block in kept(pool, 2):
        pool.release(block)
    assert pool.allocate_many(2) == [2, 3]
    assert pool.cached_blocks == 2
    pool.release(3)
    assert pool.allocate(after=0) == 3, "the one behind is cached"
    pool.check_integrity()


def test_the_longest_idle_block_is_evicted_first() -> None:
    pool = BlockPool(3, 1)
    discarded: list[int] = []
    pool.on_discard = discarded.append
    blocks = kept(pool, 3)
    for block in (1, 2, 0):
        pool.release(block)
    pool.retain(1)
    pool.release(1)  # used again, so it is the youngest
    assert pool.allocate() == 2
    assert discarded == [2]
    assert sorted(pool.allocate_many(2)) == [0, 1]
    assert discarded == [2, 0, 1]
    assert not any(pool.is_kept(block) for block in blocks)
    pool.check_integrity()


def test_a_large_pool_evicts_extra_for_adjacent_blocks() -> None:
    pool = BlockPool(3 * EVICTED_SHARE, 1)
    for block in reversed(kept(pool, 3 * EVICTED_SHARE)):
        pool.release(block)
    grown = [pool.allocate()]
    for _ in range(2):
        grown.append(pool.allocate(after=grown[-1]))
    last = 3 * EVICTED_SHARE - 1
    assert grown == [last - 2, last - 1, last]
    assert pool.cached_blocks == 3 * EVICTED_SHARE - 3
    pool.check_integrity()


def test_a_discarded_block_is_blank() -> None:
    pool = BlockPool(2, 1)
    first, second = kept(pool, 2)
    pool.release(first)
    pool.discard(first)
    pool.discard(second)
    assert (pool.cached_blocks, pool.free_blocks, pool.count(second)) == (0, 1, 1)
    pool.release(second)
    assert pool.cached_blocks == 0
    with pytest.raises(ValueError, match="not kept"):
        pool.discard(first)
    with pytest.raises(ValueError, match="is free"):
        pool.keep(first)
    pool.check_integrity()


@pytest.mark.parametrize("block", [-1, 2, 1])
def test_only_used_blocks_can_be_retained_or_released(block: int) -> None:
    pool = BlockPool(2, 1)
    pool.allocate()
    with pytest.raises(ValueError, match="block"):
        pool.release(block)
    with pytest.raises(ValueError, match="block"):
        pool.retain(block)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 1), (1, 0), (-1, 1)])
def test_pool_sizes_must_be_positive(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(num_blocks, block_size)


def test_negative_allocation_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot allocate"):
        BlockPool(1, 1).allocate_many(-1)


def lose(pool: BlockPool) -> None:
    pool._heap.remove(2)
    pool._queued[2] = 0


def set_at(name: str, index: int, value: int | None) -> Callable[[BlockPool], None]:
    return lambda pool: getattr(pool, name).__setitem__(index, value)


@pytest.mark.planted
@pytest.mark.parametrize(
    "corrupt",
    [
        set_at("_counts", 2, 1),
        set_at("_counts", 2, -1),
        lambda pool: setattr(pool, "_free_blocks", pool._free_blocks + 1),
        lambda pool: pool._heap.append(2),
        lose,
        set_at("_kept", 2, 1),
        set_at("_idle", 0, None),
    ],
    ids=["held", "negative", "one too many free", "queued twice", "lost", "kept", "idle"],
)
def test_the_integrity_check_sees_planted_damage(corrupt: Callable[[BlockPool], None]) -> None:
    pool = BlockPool(4, 1)
    pool.allocate()
    pool.check_integrity()
    corrupt(pool)
    with pytest.raises(InternalError):
        pool.check_integrity()
