"""The state of a decoder with attention: entries in the blocks of a pool, found by their tokens."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.kv import BlockPool, BlockTable, CachedPrefix, PrefixIndex


class PagedState:
    """A block table and, with prefix caching, its use of the index.

    Passes reserve, write and commit in the table.
    """

    __slots__ = ("_prefix", "finite_length", "table")

    def __init__(self, table: BlockTable, prefix: CachedPrefix | None = None) -> None:
        self.table = table
        self.finite_length = 0
        self._prefix = prefix

    @property
    def length(self) -> int:
        """Number of entries in the table."""
        return self.table.length

    def mark_finite(self) -> None:
        """Mark all entries as finite."""
        self.finite_length = self.table.length

    def truncate_to(self, length: int) -> int:
        """Drop the entries after the first `length`; every length can be reached."""
        self.table.truncate_to(length)
        self.finite_length = min(self.finite_length, length)
        if self._prefix is not None:
            self._prefix.cut_to(length)
        return length

    def lookup(self, tokens: Sequence[int]) -> int:
        """Share the blocks that hold the entries of `tokens`; returns the number of entries added."""
        return 0 if self._prefix is None else self._prefix.extend(tokens)

    def publish(self, tokens: Sequence[int]) -> None:
        """Index the blocks that are full of `tokens`."""
        if self._prefix is not None:
            self._prefix.enter(tokens)

    def withdraw(self, length: int) -> None:
        """Remove the blocks with entries at `length` and beyond from the index."""
        if self._prefix is not None:
            self._prefix.withdraw(length)

    def free(self) -> None:
        """Release every block."""
        self.table.free()


class PagedStates:
    """States in the blocks of one pool."""

    def __init__(self, pool: BlockPool, *, prefix_cache: bool) -> None:
        """`prefix_cache`: keep the entries of ended sequences, for others with the same beginning."""
        self._pool = pool
        self.prefix_index = PrefixIndex(pool) if prefix_cache else None

    def new(self, salt: str) -> PagedState:
        """A state without entries."""
        table, index = BlockTable(self._pool), self.prefix_index
        return PagedState(table, None if index is None else CachedPrefix(index, table, salt))
