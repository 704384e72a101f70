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
        sizes = [count, count, count, sequences, sequences, sequences * width]
        device = cache.device
        pinned = device.type == "cuda" and torch.cuda.is_available()
        self._host = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=pinned)
        ids, positions, wanted, seeds, temperatures, addresses = np.split(
            self._host.numpy(), np.cumsum(sizes)[:-1]
        )
        self._ids, self._positions = ids.reshape(sequences, rows), positions.reshape(sequences, rows)
        self._wanted, self._seeds, self._temperatures = wanted, seeds, temperatures.view(np.float64)
        self._addresses = addresses.reshape(sequences, width)
        self._device = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        parts = torch.split(self._device, sizes)
        self.ids, self.positions, self.wanted, self.seeds, temperature, address = parts
        """int64 [sequences * rows] for the first three; `wanted` has the rows whose logits are reported, in
        order, then padding. int64 [sequences] for the fourth: the bits of the seeds."""
        self.temperatures = temperature.view(torch.float64)
        self._address = address.view(sequences, width)
        kind = GATHERED if bucket.scattered else attention
        self._attention = kind.fixed(sequences, rows, bucket.keys, self._unit, device)
        self._sent = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def write(self, layout: PassLayout) -> None:
        """Write a pass: one row or more of each sequence, or of each branch if entries are scattered."""
        self._begin()
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
        self._begin()
        for row, (sequence, item) in enumerate(zip(sequences, inputs, strict=True)):
            self._write(row, sequence, layout, sequence.length)
            seed = 0 if item.noise is None else item.noise.seed & _MASK
            self._seeds[row] = np.uint64(seed).astype(np.int64)
            self._temperatures[row] = item.temperature
        self._wanted[:] = np.arange(self._wanted.size)
        self._send(len(sequences))

    def batch(self, ids: Tensor, positions: Tensor) -> RaggedBatch:
        """The pass over these rows, int64 [sequences * rows]; made anew in each recorded step.

        A row's entry goes to the slot of its position: key p of a sequence is the entry at position p.
        """
        sequences, rows, unit = self.bucket.sequences, self.bucket.rows, self._unit
        places = positions.view(sequences, rows)
        slots = self._address.gather(1, places // unit) * unit + places % unit
        return RaggedBatch(
            cache=self._cache,
            attention=self._attention.at(self._address, places),
            input_ids=ids[None],
            position_ids=positions[None],
            slots=slots.view(-1),
            slot_range=None,
            logits_to_keep=self.wanted,
            num_logits=sequences * rows,
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

    def _begin(self) -> None:
        """Wait until the last transfer has read the host buffer."""
        if self._sent is not None:
            self._sent.synchronize()

    def _send(self, count: int) -> None:
        """Pad with the last sequence and send the buffer."""
        for part in (self._ids, self._positions, self._seeds, self._temperatures, self._addresses):
            part[count:] = part[count - 1]
        self._device.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
