"""Chooses how attention reads a model's cache: in place where the device passes a trial, else from copies."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from paceline.core.errors import InvalidArgumentError
from paceline.engine.backends.cache_attention.gathered import GATHERED
from paceline.engine.backends.cache_attention.interface import CacheAttention
from paceline.engine.backends.cache_attention.varlen import BLOCK, VARLEN, VarlenAttention, reason_against
from paceline.engine.backends.ragged_batch import RaggedBatch
from paceline.engine.cache import LayerLayout, PagedCache
from paceline.engine.layout import PassLayout, SequenceInput
from paceline.kv import BlockTable

log = logging.getLogger(__name__)

_TOLERANCE: Final = 0.03
"""Relative difference of a row's results. Both ways round to 16 bits; a wrong visible key changes more."""
_ENTRIES: Final = (2.2, 0.1, 1.0)
"""Entries of the trial's sequences, in blocks: part of a block, a whole one, and several."""
_ROWS: Final = ((1, 1, 1), (5, 5, 5), (300, 1, 5), (5,), (1,))
"""Rows of those sequences in the trial's passes: decoding, verification, a mixed pass, and one sequence
alone, whose keys the kernel may split."""


def choose_attention(
    asked: str,
    layers: Sequence[LayerLayout],
    dtype: torch.dtype,
    device: torch.device,
    block_size: int | None,
) -> CacheAttention:
    """The attention named `asked`; for `auto` in place if that passes a trial on the device.

    `block_size` is that of the cache, if given. Raises InvalidArgumentError naming `attention_backend` if
    attention in place is asked for and cannot run.
    """
    if asked == GATHERED.name or (asked != VARLEN and device.type != "cuda"):
        return GATHERED
    why = reason_against(layers, dtype, device)
    attention = VarlenAttention(block_size or BLOCK)
    if why is None:
        why = error_in_trial(attention, layers, dtype, device)
    if why is None:
        return attention
    if asked == VARLEN:
        raise InvalidArgumentError("attention_backend", f"{VARLEN} {why}")
    log.warning("attention reads copies of the cache: attention in place %s", why)
    return GATHERED


@torch.inference_mode()
def error_in_trial(
    attention: CacheAttention, layers: Sequence[LayerLayout], dtype: torch.dtype, device: torch.device
) -> str | None:
    """What is wrong with attention on random entries, compared with the gathered one; None if nothing is."""
    try:
        for layer in dict.fromkeys(layers):
            difference = _largest_difference(attention, layer, dtype, device)
            if not difference < _TOLERANCE:  # NaN is an error as well
                return f"differs from the reference on this device (relative difference {difference:.1e})"
    except RuntimeError as error:  # the kernel's checks of shapes, devices and libraries
        return f"fails on this device with blocks of {attention.smallest_block}: {_first_line(error)}"
    return None


def _largest_difference(
    attention: CacheAttention, layer: LayerLayout, dtype: torch.dtype, device: torch.device
) -> float:
    size = attention.smallest_block
    lengths = [max(5, int(size * blocks)) for blocks in _ENTRIES]
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    cache = PagedCache(
        [layer],
        num_blocks=sum(-(-n // size) for n in lengths),
        block_size=size,
        dtype=dtype,
        device=device,
    )
    differences = []
    for rows in _ROWS:
        inputs = _inputs(cache, [(n, min(n, asked)) for n, asked in zip(lengths, rows, strict=False)])
        cache.entries[0].fill_(torch.nan)
        for item in inputs:
            slots = torch.tensor(item.table.slots(0, item.table.length + len(item.token_ids))).to(device)
            cache.entries[0].index_copy_(0, slots, random(len(slots), layer.width))
        layout = PassLayout.of_sequences(inputs)
        query = random(layout.rows.shape[1], layer.num_kv_heads * layer.per_kv, layer.key_dim)
        found, right = (
            RaggedBatch.build(layout, cache, kind).attend(0, query, None).float()
            for kind in (attention, GATHERED)
        )
        differences.append(((found - right).norm(dim=(1, 2)) / right.norm(dim=(1, 2))).max())
        for item in inputs:
            item.table.free()
    return float(torch.stack(differences).max())


def _inputs(cache: PagedCache, sequences: Sequence[tuple[int, int]]) -> list[SequenceInput]:
    """Sequences by (entries, rows), blocks of several in turn, with room for the rows at their ends."""
    tables = [BlockTable(cache.pool) for _ in sequences]
    for start in range(0, max(n for n, _ in sequences), cache.block_size):
        for table, (length, rows) in zip(tables, sequences, strict=True):
            count = max(0, min(cache.block_size, length - rows - start))
            table.reserve(count)
            table.commit(count)
    for table, (_, rows) in zip(tables, sequences, strict=True):
        table.reserve(rows)
    return [SequenceInput(table, [0] * rows, 1) for table, (_, rows) in zip(tables, sequences, strict=True)]


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
