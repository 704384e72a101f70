"""The physical blocks of one KV cache: who holds each, and which are free. No tensors here."""

from __future__ import annotations

import heapq

from paceline.core.errors import InternalError, ResourceExhaustedError


class BlockPool:
    """Reference-counted blocks of `block_size` entries each.

    A block is either free (count 0) or used (count >= 1), never both. Free blocks are handed out lowest
    id first, or next to the caller's last one where that is free, so that a sequence alone in the pool
    lies contiguously and its attention needs no gather.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._counts = [0] * num_blocks
        self._free_blocks = num_blocks
        # Every free block is in the heap exactly once. A block taken out of turn leaves its entry behind;
        # `_queued` remembers that, so the entry is skipped while the block is used and reused after.
        self._heap = list(range(num_blocks))
        self._queued = bytearray(b"\x01" * num_blocks)

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self._free_blocks

    @property
    def used_blocks(self) -> int:
        """Blocks that at least one holder has."""
        return self.num_blocks - self._free_blocks

    def count(self, block: int) -> int:
        """How many hold `block`; 0 when it is free."""
        self._check_id(block)
        return self._counts[block]

    def allocate(self, *, after: int | None = None) -> int:
        """Take one free block with count 1, `after + 1` where possible; see `allocate_many`."""
        return self.allocate_many(1, after=after)[0]

    def allocate_many(self, n: int, *, after: int | None = None) -> list[int]:
        """Take `n` free blocks with count 1 each, continuing past block `after` as long as those are free.

        Raises ResourceExhaustedError, taking none, when fewer than `n` are free.
        """
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks")
        if n > self._free_blocks:
            raise ResourceExhaustedError(
                f"the KV cache has {self._free_blocks} of {self.num_blocks} blocks free, {n} are needed"
            )
        blocks = []
        last = after
        for _ in range(n):
            following = None if last is None else last + 1
            if following is None or following >= self.num_blocks or self._counts[following]:
                following = self._pop_lowest()
            self._counts[following] = 1
            blocks.append(following)
            last = following
        self._free_blocks -= n
        return blocks

    def retain(self, block: int) -> None:
        """Add a holder to a used block."""
        self._check_used(block)
        self._counts[block] += 1

    def release(self, block: int) -> None:
        """Drop one holder of a used block; the last one frees it."""
        self._check_used(block)
        self._counts[block] -= 1
        if self._counts[block] == 0:
            self._free_blocks += 1
            if not self._queued[block]:
                self._queued[block] = 1
                heapq.heappush(self._heap, block)

    def check_integrity(self) -> None:
        """Raise InternalError unless free + used == total, with every block exactly one of the two."""
        free = sum(count == 0 for count in self._counts)
        used = sum(count > 0 for count in self._counts)
        if free + used != self.num_blocks:
            raise InternalError("the block pool holds a block with a negative reference count")
        if free != self._free_blocks:
            raise InternalError(f"the block pool counts {self._free_blocks} free blocks but holds {free}")
        queued = set(self._heap)
        if len(queued) != len(self._heap) or queued != {b for b in range(self.num_blocks) if self._queued[b]}:
            raise InternalError("the block pool's free list disagrees with its own index")
        if any(count == 0 and block not in queued for block, count in enumerate(self._counts)):
            raise InternalError("the block pool has lost a free block")

    def _pop_lowest(self) -> int:
        while True:
            block = heapq.heappop(self._heap)
            self._queued[block] = 0
            if self._counts[block] == 0:
                return block

    def _check_id(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"there is no block {block} in a pool of {self.num_blocks}")

    def _check_used(self, block: int) -> None:
        self._check_id(block)
        if self._counts[block] == 0:
            raise ValueError(f"block {block} is free")
