"""The physical blocks of one KV cache: reference counts and free blocks. No tensors here."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable

from paceline.core.errors import InternalError, ResourceExhaustedError

EVICTED_SHARE = 64
"""One block in this many is evicted at once, so a sequence growing by single blocks gets consecutive ones."""


class BlockPool:
    """Reference-counted blocks of `block_size` entries each.

    A block is either free (count 0) or used (count >= 1), never both. A free block is blank or cached. A
    cached block keeps its contents after its last holder releases it, and can be retained again until its
    room is needed. Blank blocks are allocated lowest id first, or next to the caller's last block if that one
    is blank, so that a sequence alone in the pool lies contiguously and its attention needs no gather.
    Without blank blocks, cached blocks become blank, longest idle first.
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
        # Every free block is in the heap exactly once. A block taken out of turn leaves its entry behind.
        # `_queued` records this, so the entry is skipped while the block is used and reused afterwards.
        self._heap = list(range(num_blocks))
        self._queued = bytearray(b"\x01" * num_blocks)
        self._kept = bytearray(num_blocks)
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached blocks, longest idle first
        self.on_discard: Callable[[int], None] = lambda block: None
        """Called with each kept block whose contents are discarded."""

    @property
    def free_blocks(self) -> int:
        """Blocks without a holder, including cached ones."""
        return self._free_blocks

    @property
    def cached_blocks(self) -> int:
        """Free blocks with reusable contents."""
        return len(self._idle)

    @property
    def used_blocks(self) -> int:
        """Blocks with at least one holder."""
        return self.num_blocks - self._free_blocks

    def count(self, block: int) -> int:
        """Number of holders of `block`; 0 if it is free."""
        self._check_id(block)
        return self._counts[block]

    def allocate(self, *, after: int | None = None) -> int:
        """Take one free block with count 1, `after + 1` where possible; see `allocate_many`."""
        return self.allocate_many(1, after=after)[0]

    def allocate_many(self, n: int, *, after: int | None = None) -> list[int]:
        """Take `n` free blocks with count 1 each, continuing past block `after` as long as those are blank.

        Raises ResourceExhaustedError, taking none, when fewer than `n` are free.
        """
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks")
        if n > self._free_blocks:
            raise ResourceExhaustedError(
                f"the KV cache has {self._free_blocks} of {self.num_blocks} blocks free, {n} are needed"
            )
        blank = self._free_blocks - len(self._idle)
        if n > blank:
            self._evict(max(n - blank, self.num_blocks // EVICTED_SHARE))
        blocks = []
        last = after
        for _ in range(n):
            following = None if last is None else last + 1
            if following is None or following >= self.num_blocks or not self._is_blank(following):
                following = self._pop_lowest()
            self._counts[following] = 1
            blocks.append(following)
            last = following
        self._free_blocks -= n
        return blocks

    def retain(self, block: int) -> None:
        """Add a holder to a used or cached block."""
        self._check_id(block)
        if block in self._idle:
            del self._idle[block]
            self._free_blocks -= 1
        else:
            self._check_used(block)
        self._counts[block] += 1

    def release(self, block: int) -> None:
        """Remove one holder of a used block. The last one frees it; a kept block becomes cached."""
        self._check_used(block)
        self._counts[block] -= 1
        if self._counts[block] == 0:
            self._free_blocks += 1
            if self._kept[block]:
                self._idle[block] = None
            else:
                self._queue(block)

    def keep(self, block: int) -> None:
        """Mark the contents of a used block as final and worth keeping."""
        self._check_used(block)
        self._kept[block] = 1

    def is_kept(self, block: int) -> bool:
        """True from `keep` until the contents are discarded."""
        self._check_id(block)
        return bool(self._kept[block])

    def discard(self, block: int) -> None:
        """Discard the contents of a kept block; a cached one becomes blank."""
        self._check_id(block)
        if not self._kept[block]:
            raise ValueError(f"block {block} is not kept")
        self._kept[block] = 0
        if block in self._idle:
            del self._idle[block]
            self._queue(block)
        self.on_discard(block)

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
        if any(self._counts[block] or not self._kept[block] for block in self._idle):
            raise InternalError("the block pool caches a block that is used or not kept")
        idle = self._idle
        lost = (count == 0 and b not in queued and b not in idle for b, count in enumerate(self._counts))
        if any(lost) or any(
            self._kept[b] and count == 0 and b not in idle for b, count in enumerate(self._counts)
        ):
            raise InternalError("the block pool has lost a free block")

    def _is_blank(self, block: int) -> bool:
        return self._counts[block] == 0 and not self._kept[block]

    def _evict(self, n: int) -> None:
        for _ in range(min(n, len(self._idle))):
            self.discard(next(iter(self._idle)))

    def _queue(self, block: int) -> None:
        if not self._queued[block]:
            self._queued[block] = 1
            heapq.heappush(self._heap, block)

    def _pop_lowest(self) -> int:
        while True:
            block = heapq.heappop(self._heap)
            self._queued[block] = 0
            if self._is_blank(block):
                return block

    def _check_id(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"there is no block {block} in a pool of {self.num_blocks}")

    def _check_used(self, block: int) -> None:
        self._check_id(block)
        if self._counts[block] == 0:
            raise ValueError(f"block {block} is free")
