"""One sequence's map from positions to cache slots, and its rollback. No tensors here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from paceline.kv.pool import BlockPool


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """The tensor owner must copy block `source` onto block `destination` before the next write."""

    source: int
    destination: int


class BlockTable:
    """The blocks of one sequence, in order; position p lives in slot blocks[p // size] * size + p % size.

    Entries [0, length) hold values, [length, length + reserved) may be written. A block with several
    holders is never written: `share` takes full blocks only, and `reserve` replaces a shared tail.
    """

    __slots__ = ("_blocks", "_contiguous", "_length", "_pool", "_reserved")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: list[int] = []
        self._length = 0
        self._reserved = 0
        self._contiguous = 0  # number of leading blocks with consecutive ids

    @property
    def length(self) -> int:
        """num_computed_tokens: the number of entries that hold values."""
        return self._length

    @property
    def reserved(self) -> int:
        """Number of entries past `length` that may be written and committed."""
        return self._reserved

    @property
    def blocks(self) -> tuple[int, ...]:
        """Physical block ids in order, including reserved ones."""
        return tuple(self._blocks)

    @property
    def pool(self) -> BlockPool:
        """The pool of the blocks."""
        return self._pool

    def blocks_needed(self, n: int) -> int:
        """Number of free blocks that `reserve(n)` would take now."""
        if n <= 0:
            return 0
        size = self._pool.block_size
        missing = -(-(self._length + n) // size) - len(self._blocks)
        return max(missing, 0) + self._tail_is_shared()

    def reserve(self, n: int) -> list[CopyBlock]:
        """Make room for `n` entries past `length`, replacing an earlier reservation.

        Returns the copies to carry out before writing: one if the partial last block is shared (after
        truncating into a shared prefix), else none. A kept partial block is about to be written, so its
        contents are discarded. Raises ResourceExhaustedError, changing nothing, if the pool has too few free
        blocks.
        """
        if n < 0:
            raise ValueError(f"cannot reserve {n} entries")
        needed = self.blocks_needed(n)
        copies: list[CopyBlock] = []
        if needed:
            size = self._pool.block_size
            replace = self._tail_is_shared()
            anchor = len(self._blocks) - 1 - replace
            taken = self._pool.allocate_many(needed, after=self._blocks[anchor] if anchor >= 0 else None)
            if replace:
                source = self._blocks.pop()
                assert len(self._blocks) == self._length // size
                self._contiguous = min(self._contiguous, len(self._blocks))
                copies.append(CopyBlock(source, taken[0]))
                self._pool.release(source)
            for block in taken:
                self._append(block)
        self._reserved = n
        if n and not copies:
            self._own_tail()
        return copies

    def commit(self, n: int) -> None:
        """Turn the first `n` reserved entries into entries that hold values."""
        if not 0 <= n <= self._reserved:
            raise ValueError(f"cannot commit {n} entries, {self._reserved} are reserved")
        self._length += n
        self._reserved -= n

    def truncate_to(self, length: int) -> None:
        """Keep entries [0, length); blocks whose first position is at or past `length` are released.

        Any reservation ends. With the current length, only the reservation is released.
        """
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot truncate to {length}, the table has {self._length} entries")
        kept = -(-length // self._pool.block_size)
        while len(self._blocks) > kept:
            self._pool.release(self._blocks.pop())
        self._contiguous = min(self._contiguous, kept)
        self._length = length
        self._reserved = 0

    def share(self, blocks: Sequence[int]) -> None:
        """Append full blocks that hold the next entries, either used by other sequences or cached.

        Raises ValueError unless the entries end with a block and nothing is reserved.
        """
        if self._reserved or len(self._blocks) * self._pool.block_size != self._length:
            raise ValueError("only a table whose entries end with a block can share blocks")
        for block in blocks:
            self._pool.retain(block)
            self._append(block)
        self._length = len(self._blocks) * self._pool.block_size

    def free(self) -> None:
        """Release every block. The empty table may be used again."""
        self.truncate_to(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.free()

    def slots(self, start: int, stop: int) -> list[int]:
        """Slots of positions [start, stop), which must lie within the entries and the reservation."""
        if not 0 <= start <= stop <= self._length + self._reserved:
            raise ValueError(
                f"positions [{start}, {stop}) reach outside "
                f"the {self._length} entries and {self._reserved} reserved"
            )
        size = self._pool.block_size
        first, last = start // size, -(-stop // size)
        if last <= self._contiguous:
            # One run, so the blocks need no individual lookup.
            base = (self._blocks[0] * size) if self._blocks else 0
            return list(range(base + start, base + stop))
        slots: list[int] = []
        for index in range(first, last):
            base = self._blocks[index] * size - index * size
            slots.extend(range(base + max(start, index * size), base + min(stop, (index + 1) * size)))
        return slots

    def contiguous_start(self, length: int) -> int | None:
        """The slot of position 0 if positions [0, length) lie in consecutive slots, else None."""
        size = self._pool.block_size
        if length == 0 or -(-length // size) > self._contiguous:
            return None
        return self._blocks[0] * size

    def _append(self, block: int) -> None:
        blocks = self._blocks
        if self._contiguous == len(blocks) and (not blocks or blocks[-1] + 1 == block):
            self._contiguous += 1
        blocks.append(block)

    def _own_tail(self) -> None:
        size = self._pool.block_size
        if self._length % size and self._pool.is_kept(tail := self._blocks[self._length // size]):
            self._pool.discard(tail)

    def _tail_is_shared(self) -> bool:
        """True if position `length` lies inside a block with other holders."""
        size = self._pool.block_size
        index = self._length // size
        if self._length % size == 0:
            return False
        return self._pool.count(self._blocks[index]) > 1
