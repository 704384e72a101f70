"""The prefix index: entries that a sequence finds and leaves."""

from __future__ import annotations

import itertools

import pytest

from paceline.core.errors import InternalError
from paceline.kv import BlockPool, BlockTable, CachedPrefix, PrefixIndex
from paceline.kv.prefix import first_key, next_key

SIZE = 4
PROMPT = list(range(100, 111))


class Sequence:
    """A table, fed."""

    def __init__(self, index: PrefixIndex, salt: str = "") -> None:
        self.table = BlockTable(index.pool)
        self.prefix = CachedPrefix(index, self.table, salt)

    def feed(self, tokens: list[int]) -> Sequence:
        """All that the table lacks of `tokens`, which are committed."""
        n = len(tokens) - self.table.length
        self.table.reserve(n)
        self.table.commit(n)
        self.prefix.enter(tokens)
        return self


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(BlockPool(16, SIZE))


def test_a_second_sequence_shares_the_firsts_full_blocks(index: PrefixIndex) -> None:
    first = Sequence(index).feed(PROMPT)
    second = Sequence(index)
    assert second.prefix.extend(PROMPT) == 8
    assert second.table.blocks == first.table.blocks[:2]
    assert second.table.length == 8
    second.feed(PROMPT)
    assert second.table.blocks[2] != first.table.blocks[2]


def test_published_blocks_outlive_their_sequence(index: PrefixIndex) -> None:
    Sequence(index).feed(PROMPT).table.free()
    assert (index.pool.free_blocks, index.pool.cached_blocks, len(index)) == (16, 2, 2)
    again = Sequence(index)
    assert again.prefix.extend(PROMPT) == 8
    again.table.free()
    index.pool.allocate_many(15)
    assert len(index) == 1
    # The end of a sequence goes before its beginning, without which it is of no use.
    assert Sequence(index).prefix.extend(PROMPT) == 4
    index.check_integrity()


def test_no_more_blocks_are_taken_than_allowed(index: PrefixIndex) -> None:
    Sequence(index).feed(PROMPT)
    for most in range(len(PROMPT)):
        one = Sequence(index)
        assert one.prefix.extend(PROMPT[:most]) == most // SIZE * SIZE
        one.table.free()


@pytest.mark.parametrize("changed", range(8))
def test_a_different_token_hides_its_block_and_the_rest(index: PrefixIndex, changed: int) -> None:
    Sequence(index).feed(PROMPT)
    other = list(PROMPT)
    other[changed] += 1
    assert Sequence(index).prefix.extend(other) == changed // SIZE * SIZE


def test_equal_tokens_elsewhere_are_not_found(index: PrefixIndex) -> None:
    repeated = PROMPT[:SIZE] * 2
    Sequence(index).feed(repeated)
    assert Sequence(index).prefix.extend(PROMPT[:SIZE] * 3) == 8
    assert Sequence(index).prefix.extend([1, 2, 3, 4, *PROMPT[:SIZE]]) == 0


def test_another_salt_finds_nothing(index: PrefixIndex) -> None:
    Sequence(index, "a").feed(PROMPT)
    assert Sequence(index, "a").prefix.extend(PROMPT) == 8
    for salt in ("", "b", "aa"):
        assert Sequence(index, salt).prefix.extend(PROMPT) == 0


def test_a_lookup_continues_with_another_sequences_blocks(index: PrefixIndex) -> None:
    first, second = Sequence(index), Sequence(index)
    first.feed(PROMPT[:4])
    assert second.prefix.extend(PROMPT) == 4
    first.feed(PROMPT)
    assert second.prefix.extend(PROMPT) == 4
    assert second.table.length == 8


def test_a_table_with_its_own_entries_takes_none(index: PrefixIndex) -> None:
    Sequence(index).feed(PROMPT)
    for length in (3, 4):
        own = Sequence(index)
        own.table.reserve(length)
        own.table.commit(length)
        assert own.prefix.extend(PROMPT) == 0
        own.table.free()


def test_equal_sequences_keep_their_blocks_and_one_is_indexed(index: PrefixIndex) -> None:
    first, second = Sequence(index).feed(PROMPT), Sequence(index).feed(PROMPT)
    assert len(index) == 2
    first.table.free()
    second.table.free()
    assert (index.pool.cached_blocks, index.pool.free_blocks) == (2, 16)
    index.check_integrity()


def test_only_full_blocks_of_committed_tokens_are_entered(index: PrefixIndex) -> None:
    one = Sequence(index)
    one.table.reserve(11)
    one.table.commit(11)
    one.prefix.enter(PROMPT[:7])  # the others are proposals
    assert len(index) == 1


def test_a_rewritten_ledger_removes_its_old_block(index: PrefixIndex) -> None:
    one = Sequence(index).feed(PROMPT)
    one.table.truncate_to(6)
    one.prefix.cut_to(6)
    other = [*PROMPT[:6], 1, 2, 3]
    one.feed(other)
    assert Sequence(index).prefix.extend(PROMPT) == 4
    assert Sequence(index).prefix.extend(other) == 8
    index.check_integrity()


def test_going_back_into_a_shared_block_leaves_it_unchanged(index: PrefixIndex) -> None:
    Sequence(index).feed(PROMPT)
    second = Sequence(index)
    second.prefix.extend(PROMPT)
    second.table.truncate_to(6)
    second.prefix.cut_to(6)
    second.feed([*PROMPT[:6], 1, 2, 3])
    assert Sequence(index).prefix.extend(PROMPT) == 8


def test_keys_are_unique_by_salt_and_tokens() -> None:
    keys = [first_key(""), first_key("a"), next_key(first_key(""), [1, 2]), next_key(first_key("a"), [1, 2])]
    keys += [next_key(next_key(first_key(""), [1]), [2]), next_key(first_key(""), [2**32 - 1])]
    assert all(a != b for a, b in itertools.combinations(keys, 2))
    assert {len(key) for key in keys} == {32}


@pytest.mark.planted
def test_the_integrity_check_sees_planted_damage(index: PrefixIndex) -> None:
    one = Sequence(index).feed(PROMPT)
    index.check_integrity()
    index.pool.keep(one.table.blocks[2])
    with pytest.raises(InternalError):
        index.check_integrity()
