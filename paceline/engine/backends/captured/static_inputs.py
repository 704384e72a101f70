"""The inputs of one bucket, at fixed addresses that a replay reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.engine.backends.cache_attention.gathered import GATHERED
from paceline.engine.backends.cache_attention.interface import CacheAttention
from paceline.engine.backends.captured.buckets import Bucket
from paceline.engine.backends.captured.buffer import Buffer
from paceline.engine.backends.ragged_batch import RaggedBatch
from paceline.engine.cache import PagedCache
from paceline.engine.layout import Indices, PassLayout, SequenceRows
from paceline.engine.multi_step import ChainInput

_MASK: Final = 2**64 - 1


class StaticInputs:
    """All inputs of a step, in one transfer to the cache's device, which is the current one.

    Padding repeats the first row of a sequence before it, and the last sequence. A repeated row writes the
    same entry as its original, so padding changes nothing in the cache; its logits are not returned.
    """

    def __init__(self, bucket: Bucket, cache: PagedCache, attention: CacheAttention = GATHERED) -> None:
        self.bucket = bucket
        self._cache = cache
        self._unit = 1 if bucket.scattered else cache.block_size
        sequences, rows, width = bucket.sequences, bucket.rows, bucket.keys // self._unit
        count = sequences * rows
        wanted = sequences if bucket.steps else count
        draws = sequences * bucket.steps if bucket.support else 0
        sizes = [count, count, wanted, sequences, sequences, draws, sequences * width]
        device = cache.device
        self._buffer = Buffer(sizes, device)
        ids, positions, self._wanted, self._seeds, temperatures, uniforms, addresses = self._buffer.host
        self._ids, self._positions = ids.reshape(sequences, rows), positions.reshape(sequences, rows)
        self._temperatures = temperatures.view(np.float64)
        self._uniforms = uniforms.view(np.float64).reshape(sequences, -1)
        self._addresses = addresses.reshape(sequences, width)
        parts = self._buffer.device
        self.ids, self.positions, self.wanted, self.seeds, temperature, uniform, address = parts
        """int64 [sequences * rows] for the first two. `wanted` has the rows whose logits are reported, in
        order, then padding; in a chain the last of each sequence. int64 [sequences] for the fourth: the bits
        of the seeds."""
        self.temperatures = temperature.view(torch.float64)
        self.uniforms = uniform.view(torch.float64).view(sequences, -1)
        """float64 [sequences, steps]: what the rows are drawn with; nothing if they are not drawn."""
        self._address = address.view(sequences, width)
        kind = GATHERED if bucket.scattered else attention
        self._attention = {
            n: kind.fixed(sequences, n, bucket.keys, self._unit, device)
            for n in {rows, 1 if bucket.steps else rows}
        }
        """By rows of a sequence; later steps of a chain have one."""
        self._one_each = torch.arange(sequences, device=device)

    def write(self, layout: PassLayout) -> None:
        """Write a pass: one row or more of each sequence, none of them with entries of its own."""
        self._buffer.begin()
        places: list[Indices] = []
        for row, sequence in enumerate(layout.sequences):
            self._write(row, sequence, layout, sequence.stop)
            stop = (row + 1) * self.bucket.rows
            places.append(np.arange(stop - sequence.count, stop))
        count = len(layout.wanted)
        self._wanted[:count] = np.concatenate(places)[layout.wanted]
        self._wanted[count:] = 0
        self._send(len(layout.sequences))

    def write_chains(
        self, layout: PassLayout, sequences: Sequence[SequenceRows], inputs: Sequence[ChainInput]
    ) -> None:
        """Write some chains of a pass, all with the bucket's number of steps, and all on branches or none."""
        self._buffer.begin()
        for row, (sequence, item) in enumerate(zip(sequences, inputs, strict=True)):
            self._write(row, sequence, layout, sequence.length)
            seed = 0 if item.noise is None else item.noise.seed & _MASK
            self._seeds[row] = np.uint64(seed).astype(np.int64)
            self._temperatures[row] = item.temperature
            if item.draws is not None:
                self._uniforms[row] = item.draws.uniforms
        # Padding precedes a sequence's rows, so the newest token is always in the last.
        self._wanted[:] = np.arange(1, len(self._wanted) + 1) * self.bucket.rows - 1
        self._send(len(sequences))

    def written(self) -> RaggedBatch:
        """The pass that was written, or the first of a chain."""
        return self.batch(self.ids, self.positions)

    def batch(self, ids: Tensor, positions: Tensor) -> RaggedBatch:
        """The pass over these rows, int64 [sequences * rows]; made anew in each recorded step.

        Later steps of a chain have one row a sequence. A row's entry goes to the slot of its position: key p
        of a sequence is the entry at position p.
        """
        sequences, unit = self.bucket.sequences, self._unit
        rows = len(ids) // sequences
        wanted = self.wanted if rows == self.bucket.rows else self._one_each
        places = positions.view(sequences, rows)
        slots = self._address.gather(1, places // unit) * unit + places % unit
        return RaggedBatch(
            cache=self._cache,
            attention=self._attention[rows].at(self._address, places),
            input_ids=ids[None],
            position_ids=positions[None],
            slots=slots.view(-1),
            slot_range=None,
            logits_to_keep=wanted,
            num_logits=len(wanted),
        )

    def _write(self, row: int, sequence: SequenceRows, layout: PassLayout, length: int) -> None:
        self._rows(row, layout.rows[0, sequence.first : sequence.first + sequence.count], sequence.start)
        if self.bucket.scattered:
            self._address_row(row, sequence.slots(0, length))
        else:
            self._address_row(row, sequence.blocks_of_table(-(-length // self._unit)))

    def _rows(self, row: int, token_ids: Indices, start: int) -> None:
        padding = self.bucket.rows - len(token_ids)
        self._ids[row, :padding] = token_ids[0]
        self._ids[row, padding:] = token_ids
        self._positions[row] = np.maximum(np.arange(-padding, len(token_ids)), 0) + start

    def _address_row(self, row: int, addresses: Sequence[int] | Indices) -> None:
        line: npt.NDArray[np.int64] = self._addresses[row]
        line[: len(addresses)] = addresses
        line[len(addresses) :] = addresses[0]

    def _send(self, count: int) -> None:
        """Pad with the last sequence and send the buffer."""
        parts = self._ids, self._positions, self._seeds, self._temperatures, self._uniforms, self._addresses
        for part in parts:
            part[count:] = part[count - 1]
        self._buffer.send()
