"""A pass as the torch backends run it: rows side by side, and the attention of their sequences.

Linear layers see the real rows only. The batch is derived from a `PassLayout` once per pass and used by every
layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import numpy as np
from torch import Tensor

from paceline.engine.backends.cache_attention.gathered import GATHERED, lone
from paceline.engine.backends.cache_attention.interface import (
    CacheAttention,
    Packer,
    PassAttention,
    array_to_device,
)
from paceline.engine.cache import PagedCache
from paceline.engine.layout import PassLayout


@dataclass(slots=True)
class RaggedBatch:
    """One forward pass: T rows of all sequences, one after the other."""

    cache: PagedCache
    attention: PassAttention
    input_ids: Tensor
    """[1, T] int64."""
    position_ids: Tensor
    """[1, T] int64."""
    slots: Tensor
    """[T] int64: slots of the new keys and values."""
    slot_range: tuple[int, int] | None
    """The slots as a range if they are consecutive."""
    logits_to_keep: int | Tensor
    """transformers' argument: a count from the end, 0 meaning all rows, or an index [R]."""
    num_logits: int
    _targets: list[Tensor] = field(default_factory=list)

    @classmethod
    def build(cls, layout: PassLayout, cache: PagedCache, attention: CacheAttention = GATHERED) -> Self:
        """Transfer `layout` to the cache's device."""
        if len(layout.sequences) == 1 and not layout.sequences[0].own and not attention.in_place:
            return cls._build_one(layout, cache)
        return cls._build_many(layout, cache, attention)

    def attend(
        self, layer: int, query: Tensor, scaling: float | None, softcap: float | None = None
    ) -> Tensor:
        """Attention of the rows [T, Hq, D] over their sequences' entries; returns [T, Hq, Dv].

        The rows of this pass must have been written, because they see one another through the cache.
        """
        return self.attention.attend(self.cache, layer, query, scaling, softcap)

    def write(self, layer: int, entries: Tensor) -> None:
        """Store the rows' entries, [T, width], in their slots."""
        if self.slot_range is None:
            self.cache.entries[layer].index_copy_(0, self.slots, entries)
            return
        if not self._targets:
            self._targets = self.cache.slots(*self.slot_range)
        self._targets[layer].copy_(entries)

    def write_heads(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store the rows' keys and values in a model's form, [1, kv_heads, T, dim]."""
        for store, rows in ((self.cache.keys, key), (self.cache.values, value)):
            if self.slot_range is None:
                store[layer].index_copy_(0, self.slots, rows[0].transpose(0, 1))
            else:
                start, stop = self.slot_range
                store[layer][start:stop].copy_(rows[0].transpose(0, 1))

    @classmethod
    def _build_one(cls, layout: PassLayout, cache: PagedCache) -> Self:
        """One sequence, with as few tensors as possible: the case that determines latency."""
        (sequence,) = layout.sequences
        start, stop, base = sequence.start, sequence.stop, sequence.base
        rows, count = array_to_device(layout.rows, cache.device), _count_to_keep(layout)
        return cls(
            cache=cache,
            attention=lone(sequence, cache),
            input_ids=rows[0:1],
            position_ids=rows[1:2],
            slots=rows[2],
            slot_range=None if base is None else (base + start, base + stop),
            logits_to_keep=array_to_device(layout.wanted, cache.device) if count is None else count,
            num_logits=len(layout.wanted),
        )

    @classmethod
    def _build_many(cls, layout: PassLayout, cache: PagedCache, attention: CacheAttention) -> Self:
        total = layout.rows.shape[1]
        parts = Packer()
        rows = parts.add(layout.rows.ravel())
        count = _count_to_keep(layout)
        wanted = 0 if count is not None else parts.add(layout.wanted)
        made = attention.lay_out(layout, cache, parts)
        sent = parts.send(cache.device)
        tokens = sent[rows].view(3, total)
        return cls(
            cache=cache,
            attention=made(sent),
            input_ids=tokens[0:1],
            position_ids=tokens[1:2],
            slots=tokens[2],
            slot_range=None,
            logits_to_keep=sent[wanted] if count is None else count,
            num_logits=len(layout.wanted),
        )


def _count_to_keep(layout: PassLayout) -> int | None:
    """Rows from the end whose logits are computed, 0 meaning all; None if others are wanted, or in disorder.

    With no wanted rows it is one too many, which is cheaper than an index and is sliced off.
    """
    total, wanted = layout.rows.shape[1], layout.wanted
    count = len(wanted)
    if not count:
        return 1
    if not np.array_equal(wanted, np.arange(total - count, total)):
        return None
    return 0 if count == total else count
