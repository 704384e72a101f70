"""Attention that reads keys and values where they lie, by torch's `varlen_attn`: no gather and no mask.

The kernel (FlashAttention) takes block tables and the number of entries of each sequence. The rows of a
sequence are its last ones, so causality follows from these numbers. Sequences with entries of their own, as
branches and trees have, are gathered (split.py).

This has not been run on a GPU: tests replace the kernel by sums on a CPU. A worker therefore tries it on its
device at start (`attention_choice.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from paceline.core.errors import InternalError
from paceline.engine.backends.cache_attention.interface import FixedAttention, Packer, PassAttention
from paceline.engine.backends.cache_attention.split import lay_out_split
from paceline.engine.cache import LayerLayout, PagedCache
from paceline.engine.layout import PassLayout

VARLEN: Final = "varlen"
BLOCK: Final = 256
"""The kernel's blocks are whole multiples of this."""
_DTYPES: Final = {torch.float16, torch.bfloat16}
_ARGUMENTS: Final = {"seqused_k", "block_table", "num_splits", "enable_gqa"}
_MAX_HEAD: Final = 256
_HEAD_UNIT: Final = 8


def reason_against(layers: Sequence[LayerLayout], dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernel cannot serve such layers on a device; None if it may."""
    if device.type != "cuda":
        return f"requires a CUDA device, and the model is on {device}"
    if not inspect.signature(varlen_attn).parameters.keys() >= _ARGUMENTS:
        return f"requires a newer torch than {torch.__version__}"
    if dtype not in _DTYPES:
        return f"requires a model of 16 bits, not {str(dtype).removeprefix('torch.')}"
    if any(layer.softcap for layer in layers):
        return "does not support the model's softcap"
    if any(layer.key_dim != layer.value_dim or layer.key_dim % _HEAD_UNIT for layer in layers):
        return f"requires heads of a multiple of {_HEAD_UNIT} dimensions, the same for keys and values"
    if any(layer.key_dim > _MAX_HEAD for layer in layers):
        return f"supports heads of up to {_MAX_HEAD} dimensions"
    return None


@dataclass(frozen=True, slots=True)
class _VarlenPass:
    """The kernel's arguments that all layers share: int32, on the device."""

    blocks: Tensor
    """[N, width]: the blocks of each sequence. Entries behind its last block are not read."""
    lengths: Tensor
    """[N]: the number of its entries, those of its rows included."""
    row_ends: Tensor
    """[N + 1]: cumulative numbers of rows."""
    entry_ends: Tensor
    """[N + 1]: cumulative `lengths`."""
    max_rows: int
    max_keys: int
    """At least the largest of `lengths`. If keys are split, then into parts of this."""

    def attend(
        self, cache: PagedCache, layer: int, query: Tensor, scaling: float | None, softcap: float | None
    ) -> Tensor:
        """See `PassAttention`."""
        if softcap is not None:
            raise InternalError("attention in place does not support softcap")
        keys, values = (
            part[layer].view(cache.num_blocks, cache.block_size, *part[layer].shape[1:])
            for part in (cache.keys, cache.values)
        )
        window, grouped = cache.windows[layer], query.shape[1] > keys.shape[2]
        left = -1 if window is None else window - 1
        # The last row sees all entries. Without causality, the kernel joins the query heads of one key head.
        right = -1 if self.max_rows == 1 and window is None else 0
        # Several workers per sequence: wrong for packed rows in torch 2.13 (pytorch#194167), but right for a
        # single sequence and for joined heads.
        may_split = len(self.lengths) == 1 or (self.max_rows == 1 and window is None and grouped)
        out = varlen_attn(
            query,
            keys,
            values,
            self.row_ends,
            self.entry_ends,
            self.max_rows,
            self.max_keys,
            scale=scaling,
            window_size=(left, right),
            enable_gqa=grouped,
            seqused_k=self.lengths,
            block_table=self.blocks,
            num_splits=None if may_split else 1,
        )
        assert isinstance(out, Tensor)
        return out


@dataclass(frozen=True, slots=True)
class _PaddedPass:
    """A pass whose sequences have padding before their rows.

    The kernel takes padding for rows at earlier positions, so its results are replaced by those of the row
    that it repeats. Otherwise both would write different entries to one slot of the next layer.
    """

    inner: _VarlenPass
    sources: Tensor
    """int64 [T]: the row whose result each row takes."""

    def attend(
        self, cache: PagedCache, layer: int, query: Tensor, scaling: float | None, softcap: float | None
    ) -> Tensor:
        """See `PassAttention`."""
        return self.inner.attend(cache, layer, query, scaling, softcap).index_select(0, self.sources)


@dataclass(frozen=True, slots=True)
class _FixedVarlen:
    places: Tensor
    """int64 [S, rows]: 0, 1, …, of all rows."""
    row_ends: Tensor
    keys: int

    def at(self, blocks: Tensor, positions: Tensor) -> PassAttention:
        """See `FixedAttention`."""
        rows = positions.shape[1]
        last = positions[:, -1:]
        lengths = last[:, 0] + 1
        entry_ends = F.pad(lengths.cumsum(0), (1, 0))
        inner = _VarlenPass(blocks.int(), lengths.int(), self.row_ends, entry_ends.int(), rows, self.keys)
        if rows == 1:
            return inner
        first_real = self.places[:, -1:] - (last - positions[:, :1])
        return _PaddedPass(inner, torch.maximum(self.places, first_real).view(-1))


@dataclass(frozen=True, slots=True)
class VarlenAttention:
    """Attention in place over caches with blocks of one size."""

    smallest_block: int = BLOCK

    @property
    def name(self) -> str:
        """See `CacheAttention`."""
        return VARLEN

    @property
    def in_place(self) -> bool:
        """See `CacheAttention`."""
        return True

    def lay_out(
        self, layout: PassLayout, cache: PagedCache, parts: Packer
    ) -> Callable[[Sequence[Tensor]], PassAttention]:
        """See `CacheAttention`."""
        sequences = layout.sequences
        if any(s.own for s in sequences):
            return lay_out_split(layout, cache, parts, self)
        size, count = cache.block_size, len(sequences)
        longest = max(s.stop for s in sequences)
        max_rows = max(s.count for s in sequences)
        table = np.zeros((count, -(-longest // size)), dtype=np.int32)
        for line, s in zip(table, sequences, strict=True):
            used = s.blocks_of_table(-(-s.stop // size))
            line[: len(used)] = used
        row_ends, entry_ends = (
            np.cumsum([0, *numbers], dtype=np.int32)
            for numbers in ((s.count for s in sequences), (s.stop for s in sequences))
        )
        lengths = np.array([s.stop for s in sequences], dtype=np.int32)
        # int32 in pairs, because one transfer has all arrays.
        joined = np.concatenate([table.ravel(), lengths, row_ends, entry_ends])
        place = parts.add(np.pad(joined, (0, joined.size % 2)).view(np.int64))
        sizes = [table.size, count, count + 1, count + 1, joined.size % 2]

        def made(sent: Sequence[Tensor]) -> PassAttention:
            blocks, lengths, row_ends, entry_ends, _ = torch.split(sent[place].view(torch.int32), sizes)
            blocks = blocks.view(count, -1)
            return _VarlenPass(blocks, lengths, row_ends, entry_ends, max_rows, longest)

        return made

    def fixed(
        self, sequences: int, rows: int, keys: int, block_size: int, device: torch.device
    ) -> FixedAttention:
        """See `CacheAttention`."""
        places = torch.arange(sequences * rows, device=device).view(sequences, rows)
        row_ends = torch.arange(0, sequences * rows + 1, rows, dtype=torch.int32, device=device)
        return _FixedVarlen(places, row_ends, keys)
