"""Attention over gathered copies of the blocks, on any device: the reference.

Sequences with similar numbers of rows and keys share one call, padded, under an explicit mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.decoding.transfer import to_device
from paceline.engine.backends.cache_attention.fork import Fork
from paceline.engine.backends.cache_attention.group import AttentionGroup
from paceline.engine.backends.cache_attention.interface import (
    CacheAttention,
    FixedAttention,
    Packer,
    PassAttention,
    array_to_device,
)
from paceline.engine.cache import PagedCache
from paceline.engine.layout import Indices, PassLayout, SequenceRows

_FOLD_ROWS: Final = 64
"""Query rows per key-value head up to which folding the group of query heads into rows is faster."""
_COPIED_BYTES: Final = 128 << 20
"""Room for copies of keys and values shared by several query heads during a prompt's chunk: the cache leaves
little memory, and a long prompt has many keys. With less room, each call has fewer heads to occupy a
device."""
_ALONE_ROWS: Final = 32
"""A sequence with more rows than this (a prefill chunk) gets its own attention call."""
_ALONE_KEYS: Final = 64
"""On a CPU, so does a sequence of at least this many contiguous keys: a copy takes longer than a call."""
_SMALLEST_LENGTH_CLASS: Final = 8
"""Sequences of up to 2^8 keys share a call; longer ones share it within a factor of two."""


@dataclass(slots=True)
class GatheredPass:
    """The calls of one pass."""

    groups: list[AttentionGroup]
    unpack: Tensor | None = None
    """[T]: the place of each row among the groups' concatenated rows; None if it is the same."""

    def attend(
        self, cache: PagedCache, layer: int, query: Tensor, scaling: float | None, softcap: float | None
    ) -> Tensor:
        """See `PassAttention`."""
        parts = [_attend(group, cache, layer, query, scaling, softcap) for group in self.groups]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        return rows if self.unpack is None else rows.index_select(0, self.unpack)


@dataclass(frozen=True, slots=True)
class _FixedGathered:
    """One call, whose keys are gathered by positions on the device."""

    within: Tensor
    """[block size]: places in a block."""
    key_positions: Tensor
    """[keys]."""

    def at(self, blocks: Tensor, positions: Tensor) -> PassAttention:
        """See `FixedAttention`."""
        slots = slots_of_blocks(blocks, self.within)
        # Masked keys must also be entries of the same sequence: the rest of its last block may hold NaN, and
        # 0 times NaN is NaN.
        gather = torch.where(self.key_positions <= positions.amax(1, keepdim=True), slots, slots[:, :1])
        return fixed_pass(gather, positions)


def slots_of_blocks(blocks: Tensor, within: Tensor) -> Tensor:
    """The slots of all entries of some blocks.

    Args:
        blocks: int64 [S, width].
        within: int64 [block size]: 0, 1, …

    Returns:
        int64 [S, width * block size].
    """
    return (blocks[:, :, None] * len(within) + within).flatten(1)


def fixed_pass(
    gather: Tensor, positions: Tensor, hidden: Tensor | None = None, key_positions: Tensor | None = None
) -> PassAttention:
    """One call of a recorded pass.

    Args:
        gather: int64 [S, keys]: the slots of the keys of each sequence.
        positions: int64 [S, rows].
        hidden: see `AttentionGroup`.
        key_positions: see there.
    """
    sequences, rows = positions.shape
    group = AttentionGroup(
        num_sequences=sequences,
        num_rows=rows,
        num_keys=gather.shape[1],
        first_position=0,
        span=None,
        rows=None,
        slot_range=None,
        gather=gather.reshape(-1),
        query_positions=positions,
        device=gather.device,
        hidden=hidden,
        key_positions=key_positions,
        fixed=True,
    )
    return GatheredPass([group])


class _Gathered:
    """Makes the calls of passes."""

    name = "gathered"
    smallest_block = 1
    in_place = False

    def lay_out(
        self, layout: PassLayout, cache: PagedCache, parts: Packer
    ) -> Callable[[Sequence[Tensor]], PassAttention]:
        """See `CacheAttention`."""
        device = cache.device
        calls = []
        unpack = np.empty(layout.rows.shape[1], dtype=np.int64)
        placed = 0
        for members in _classes(layout.sequences, alone=device.type == "cpu"):
            call = _call(members, device)
            calls.append((call.group, [None if a is None else parts.add(a) for a in call.indices]))
            for m, at in zip(members, call.places, strict=True):
                unpack[m.first : m.first + m.count] = np.arange(placed + at, placed + at + m.count)
            placed += call.size
        in_order = placed == unpack.size and bool((unpack == np.arange(placed)).all())
        unpack_part = None if in_order else parts.add(unpack)

        def made(sent: Sequence[Tensor]) -> PassAttention:
            for group, (chosen, gather, query_positions, key_positions) in calls:
                group.rows = None if chosen is None else sent[chosen]
                group.gather = None if gather is None else sent[gather]
                group.key_positions = None if key_positions is None else sent[key_positions]
                if query_positions is not None:
                    group.query_positions = sent[query_positions].view(group.num_sequences, group.num_rows)
            groups = [group for group, _ in calls]
            return GatheredPass(groups, None if unpack_part is None else sent[unpack_part])

        return made

    def fixed(
        self, sequences: int, rows: int, keys: int, block_size: int, device: torch.device
    ) -> FixedAttention:
        """See `CacheAttention`."""
        within, key_positions = (torch.arange(n, device=device) for n in (block_size, keys))
        return _FixedGathered(within, key_positions)


GATHERED: Final[CacheAttention] = _Gathered()


def lone(sequence: SequenceRows, cache: PagedCache) -> PassAttention:
    """The attention of a pass of one sequence, with as few tensors as possible."""
    start, length, base = sequence.start, sequence.stop, sequence.base
    group = AttentionGroup(
        num_sequences=1,
        num_rows=sequence.count,
        num_keys=length,
        first_position=start,
        span=None,
        rows=None,
        slot_range=None if base is None else (base, base + length),
        gather=None if base is not None else array_to_device(sequence.slots(0, length), cache.device),
        query_positions=None,
        device=cache.device,
    )
    return GatheredPass([group])


def _attend(
    group: AttentionGroup,
    cache: PagedCache,
    layer: int,
    query: Tensor,
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    """Rows of one group, [S * n, Hq, Dv] in the group's row order."""
    keys, values = group.entries(cache, layer)
    sequences, rows = group.num_sequences, group.num_rows
    heads, kv_heads = query.shape[1], keys.shape[1]
    per_kv = heads // kv_heads
    # Query heads of one key-value head become rows, so keys and values are read once for all of them. For a
    # prefill chunk, however, a mask of [rows, keys] for every query head would be large.
    fold = sequences > 1 or group.fixed or rows * per_kv <= _FOLD_ROWS
    first, mask = group.plan(cache.windows[layer], per_kv if fold else 1, query.dtype)
    if first:
        keys, values = keys[:, :, first:], values[:, :, first:]
    if group.span is not None:
        query = query.narrow(0, *group.span)
    elif group.rows is not None:
        query = query.index_select(0, group.rows)
    if rows == 1:
        out = _sdpa(query.view(sequences, kv_heads, per_kv, -1), keys, values, mask, scaling, softcap)
        return out.reshape(sequences, heads, -1)
    q = query.view(sequences, rows, kv_heads, per_kv, -1).permute(0, 2, 3, 1, 4)
    if fold:
        q = q.reshape(sequences, kv_heads, per_kv * rows, -1)
        out = _sdpa(q, keys, values, mask, scaling, softcap).view(sequences, kv_heads, per_kv, rows, -1)
        return out.permute(0, 3, 1, 2, 4).reshape(sequences * rows, heads, -1)
    q, at_once = q[0], per_kv
    if keys.device.type != "cpu":
        copied = (keys.shape[3] + values.shape[3]) * keys.shape[2] * kv_heads * keys.element_size()
        at_once = min(per_kv, max(1, _COPIED_BYTES // copied))
    parts = [
        _attend_heads(part, keys[0], values[0], mask, scaling, softcap) for part in torch.split(q, at_once, 1)
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).flatten(0, 1).transpose(0, 1)


def _attend_heads(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None, softcap: float | None
) -> Tensor:
    """Query heads [kv_heads, n, rows, D], n of each key-value head, over keys and values [kv_heads, K, D]."""
    # Key-value heads as the batch, their query heads as heads: keys are expanded, not copied.
    keys, values = (part.unsqueeze(1).expand(-1, q.shape[1], -1, -1) for part in (keys, values))
    if q.shape[1] > 1 and keys.device.type != "cpu":
        # CUDA's memory-efficient kernel, the only one that takes a mask, can silently give wrong results on
        # such layouts (pytorch#191937). A prompt's chunk justifies a copy.
        keys, values = keys.contiguous(), values.contiguous()
    return _sdpa(q, keys, values, mask, scaling, softcap)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None, softcap: float | None
) -> Tensor:
    """Softmax attention over [..., rows, D] and [..., keys, D]; `mask` is added to the scores."""
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    scores = torch.matmul(q, k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype), v)


@dataclass(frozen=True, slots=True)
class _Call:
    """One attention call whose index arrays are not on the device yet."""

    group: AttentionGroup
    size: int
    """Number of rows that it returns, padding included."""
    places: Sequence[int]
    """Start of each member's rows among those."""
    indices: tuple[Indices | None, Indices | None, Indices | None, Indices | None]
    """The group's `rows`, `gather`, `query_positions` and `key_positions`."""


def _call(members: Sequence[SequenceRows], device: torch.device) -> _Call:
    return _branches_call(members, device) if members[0].own else _sequences_call(members, device)


def _sequences_call(members: Sequence[SequenceRows], device: torch.device) -> _Call:
    rows = max(m.count for m in members)
    keys = max(m.stop for m in members)
    first = members[0]
    lone = len(members) == 1
    starts = np.array([m.first for m in members])[:, None]
    # A padding row repeats the sequence's last row, a padding key its first key.
    steps = np.minimum(np.arange(rows), np.array([m.count for m in members])[:, None] - 1)
    chosen = (starts + steps).ravel()
    consecutive = bool((chosen == np.arange(first.first, first.first + chosen.size)).all())
    gather = None
    if not lone or first.base is None:
        found = [m.slots(0, m.stop) for m in members]
        gather = np.concatenate([np.pad(s, (0, keys - len(s)), constant_values=s[0]) for s in found])
    group = AttentionGroup(
        num_sequences=len(members),
        num_rows=rows,
        num_keys=keys,
        first_position=first.start,
        span=(first.first, chosen.size) if consecutive else None,
        rows=None,
        slot_range=None if gather is not None or first.base is None else (first.base, first.base + keys),
        gather=None,
        query_positions=None,
        device=device,
    )
    positions = None if lone else (np.array([m.start for m in members])[:, None] + steps).ravel()
    places = range(0, chosen.size, rows)
    return _Call(group, chosen.size, places, (None if consecutive else chosen, gather, positions, None))


def _branches_call(members: Sequence[SequenceRows], device: torch.device) -> _Call:
    """Branches of one table: all rows see the table's entries, then those of their branch."""
    fork = Fork.of(members)
    chosen, shared = fork.rows, fork.num_shared
    rows, keys = len(chosen), shared + len(fork.own)
    hidden = np.arange(keys) >= np.array(fork.shared)[:, None]
    seen_by = [row for row, places in enumerate(fork.seen) for _ in places]
    hidden[seen_by, [shared + place for places in fork.seen for place in places]] = False
    key_positions = np.array([*range(shared), *fork.own.values()], dtype=np.int64)
    consecutive = chosen[-1] - chosen[0] == rows - 1
    group = AttentionGroup(
        num_sequences=1,
        num_rows=rows,
        num_keys=keys,
        first_position=fork.positions[0],
        span=(chosen[0], rows) if consecutive else None,
        rows=None,
        slot_range=None,
        gather=None,
        query_positions=None,
        device=device,
        hidden=to_device(torch.from_numpy(hidden)[None], device),
    )
    gather = np.concatenate([fork.longest.slots(0, shared), np.array(list(fork.own), dtype=np.int64)])
    indices = None if consecutive else np.array(chosen, dtype=np.int64), gather
    starts = [*itertools.accumulate((m.count for m in members), initial=0)]
    positions = np.array(fork.positions, dtype=np.int64)
    return _Call(group, rows, starts[:-1], (*indices, positions, key_positions))


def _classes(sequences: Sequence[SequenceRows], *, alone: bool) -> list[list[SequenceRows]]:
    """Groups of sequences that share an attention call, so that padding at most doubles the work.

    With `alone`, for a device whose calls are cheap compared with copying a cache, a sequence that needs no
    gather has its own call unless it is short. Branches of one table share one.
    """
    classes: dict[tuple[int, ...], list[SequenceRows]] = {}
    for s in sequences:
        if s.own:
            key: tuple[int, ...] = (-1, s.table)
        elif s.count > _ALONE_ROWS or (alone and s.base is not None and s.stop >= _ALONE_KEYS):
            key = (s.first,)
        else:
            rows = 1 if s.count == 1 else max(3, (s.count - 1).bit_length())
            key = (rows, max(_SMALLEST_LENGTH_CLASS, s.stop.bit_length()))
        classes.setdefault(key, []).append(s)
    return list(classes.values())
