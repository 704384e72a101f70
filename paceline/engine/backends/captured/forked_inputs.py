"""The inputs of one bucket of passes with trees or branches, at fixed addresses that a replay reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.engine.backends.cache_attention.fixed_forks import MAX_OWN, FixedForks
from paceline.engine.backends.cache_attention.fork import Fork
from paceline.engine.backends.captured.buckets import ForkedBucket
from paceline.engine.backends.captured.buffer import Buffer
from paceline.engine.backends.ragged_batch import RaggedBatch
from paceline.engine.cache import PagedCache
from paceline.engine.layout import Indices, PassLayout


class ForkedInputs:
    """All inputs of a pass, in one transfer to the cache's device, which is the current one.

    Padding repeats a fork's last row behind it, and the last fork. A repeated row sees what its original sees
    and writes the same entry, so padding changes nothing in the cache; its logits are not returned.
    """

    def __init__(self, bucket: ForkedBucket, cache: PagedCache) -> None:
        self.bucket = bucket
        self._cache = cache
        forks, rows, width = bucket.forks, bucket.rows, bucket.keys // cache.block_size
        count = forks * rows
        self._buffer = Buffer([5 * count, count, 2 * forks * MAX_OWN, forks * width], cache.device)
        fed, self._wanted, own, blocks = self._buffer.host
        self._rows = fed.reshape(5, forks, rows)
        """Of each row the token, the position, the slot, and what it sees of the table and beside it."""
        self._own, self._blocks = own.reshape(2, forks, MAX_OWN), blocks.reshape(forks, width)
        self._attention = FixedForks.of(bucket.keys, cache.block_size, cache.device)

    def write(self, layout: PassLayout, forks: Sequence[Fork]) -> None:
        """Write a pass, whose rows are those of `forks`."""
        self._buffer.begin()
        places = np.empty(layout.rows.shape[1], dtype=np.int64)
        for number, fork in enumerate(forks):
            self._write(number, fork, layout.rows[:, fork.rows])
            first = number * self.bucket.rows
            places[fork.rows] = range(first, first + len(fork.rows))
        count, wanted = len(forks), len(layout.wanted)
        for part in (self._rows, self._own, self._blocks[None]):
            part[:, count:] = part[:, count - 1 : count]
        self._wanted[:wanted] = places[layout.wanted]
        self._wanted[wanted:] = 0
        self._buffer.send()

    def written(self) -> RaggedBatch:
        """The pass that was written; made anew in each recorded step."""
        forks, rows, width = self.bucket.forks, self.bucket.rows, self._blocks.shape[1]
        fed, wanted, own, blocks = self._buffer.device
        ids, positions, slots, shared, seen = fed.view(5, forks, rows)
        own, blocks = own.view(2, forks, MAX_OWN), blocks.view(forks, width)
        return RaggedBatch(
            cache=self._cache,
            attention=self._attention.at(blocks, own, positions, slots, shared, seen),
            input_ids=ids.view(1, -1),
            position_ids=positions.view(1, -1),
            slots=slots.view(-1),
            slot_range=None,
            logits_to_keep=wanted,
            num_logits=len(wanted),
        )

    def _write(self, number: int, fork: Fork, fed: Indices) -> None:
        count, rows = len(fork.rows), self._rows[:, number]
        rows[:3, :count] = fed
        rows[3, :count] = fork.shared
        rows[4, :count] = _bits(fork.seen)
        rows[:, count:] = rows[:, count - 1 : count]
        own, others = self._own[:, number], len(fork.own)
        own[:, :others] = [*fork.own], [*fork.own.values()]
        # An entry that no row sees: any that this pass writes.
        own[0, others:] = fed[2, 0]
        blocks = fork.longest.blocks_of_table(-(-fork.num_shared // self._cache.block_size))
        self._blocks[number, : len(blocks)] = blocks
        self._blocks[number, len(blocks) :] = 0


def _bits(seen: Sequence[Sequence[int]]) -> Indices:
    """Of each row the places as bits, int64 [rows]."""
    numbers = [sum(1 << place for place in places) for places in seen]
    return np.array(numbers, dtype=np.uint64).view(np.int64)
