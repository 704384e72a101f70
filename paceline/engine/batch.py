"""A ragged batch: the rows of many sequences side by side, and how attention finds their keys.

Linear layers see the real rows only. Padding exists inside attention alone, where sequences with
similar numbers of rows and keys share one call. All of this is laid out once per pass and reused by
every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.engine.cache import PagedCache
from paceline.kv import BlockTable

Indices = npt.NDArray[np.int64]

_ALONE_ROWS: Final = 32
"""A sequence with more rows than this (a prefill chunk) is attended by itself."""
_ALONE_KEYS: Final = 64
"""On a CPU, so has a sequence of at least so many keys that lie in one piece: copying them takes longer
than a call."""
_SMALLEST_LENGTH_CLASS: Final = 8
"""Sequences of up to 2^8 keys share a call; above that, those within a factor of two."""


@dataclass(frozen=True, slots=True)
class SequenceInput:
    """Feed `token_ids` at the end of `table`; return the logits of the last `num_logits` rows (may be 0)."""

    table: BlockTable
    token_ids: Sequence[int]
    num_logits: int


@dataclass(slots=True)
class AttentionGroup:
    """Sequences that share one attention call, padded to `num_rows` rows and `num_keys` keys each."""

    num_sequences: int
    num_rows: int
    num_keys: int
    first_position: int
    """Position of the first row, where the group is a single sequence."""
    span: tuple[int, int] | None
    """(first, count) of consecutive rows of the batch. Neither this nor `rows`: all of them, in order."""
    rows: Tensor | None
    """[S * num_rows] rows of the batch."""
    slot_range: tuple[int, int] | None
    """Slots of a single sequence whose entries are contiguous: a view, no gather."""
    gather: Tensor | None
    """[S * num_keys] slots otherwise. Padding repeats a slot of the same sequence, so that no other
    sequence's values, NaN above all, can reach its sums."""
    query_positions: Tensor | None
    """[S, num_rows] positions, padding repeating the last one; None when a single sequence has them all
    consecutive from `first_position`."""
    device: torch.device
    hidden: Tensor | None = None
    """[1, num_rows, num_keys], where what a row sees does not follow from positions: rows of a tree."""
    key_positions: Tensor | None = None
    """[num_keys] positions of the keys of such rows."""
    fixed: bool = False
    """The call is recorded and serves other batches of its shape: nothing in it may follow from the numbers
    of this one, which are in `gather` and `query_positions` alone."""
    _plans: dict[tuple[int | None, int, torch.dtype], tuple[int, Tensor | None]] = field(default_factory=dict)
    _views: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def entries(self, cache: PagedCache, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [S, kv_heads, num_keys, dim]."""
        if self.slot_range is not None:
            if not self._views:
                self._views = cache.by_head(*self.slot_range)
            return self._views[layer]
        assert self.gather is not None
        found = cache.entries[layer].index_select(0, self.gather).view(self.num_sequences, self.num_keys, -1)
        keys, values = cache.layers[layer].split(found)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def plan(self, window: int | None, repeat: int, dtype: torch.dtype) -> tuple[int, Tensor | None]:
        """(first key that any row sees, additive mask or None when every row sees every key from there).

        The mask is [S, 1, repeat * num_rows, num_keys - first]: query heads of one key-value head are
        folded into rows, `repeat` times over. Built by the first layer that asks, shared by the others.
        """
        key = (window, repeat, dtype)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._make_plan(window, repeat, dtype)
        return plan

    def _make_plan(self, window: int | None, repeat: int, dtype: torch.dtype) -> tuple[int, Tensor | None]:
        if self.hidden is not None:
            return 0, self._mask(self._out_of_window(self.hidden, window), repeat, dtype)
        if window is not None and window >= self.num_keys:
            window = None
        first = 0
        if self.slot_range is not None and window is not None:
            first = max(0, self.first_position - window + 1)
        lone = self.num_sequences == 1 and not self.fixed
        if lone and self.num_rows == 1 and (self.slot_range is not None or window is None):
            return first, None
        if lone and window is None:
            # Only the corner where the new rows meet their own keys is not all visible.
            shape = (1, repeat, self.num_rows, self.num_keys)
            mask = torch.full(shape, float("-inf"), dtype=dtype, device=self.device)
            mask.triu_(self.first_position + 1)
            return first, mask.view(1, 1, repeat * self.num_rows, self.num_keys)
        positions = self.query_positions
        if positions is None:
            stop = self.first_position + self.num_rows
            positions = torch.arange(self.first_position, stop, device=self.device)[None]
        keys = torch.arange(first, self.num_keys, device=self.device)
        hidden = keys > positions[..., None]
        if window is not None:
            hidden |= keys <= positions[..., None] - window
        return first, self._mask(hidden, repeat, dtype)

    def _mask(self, hidden: Tensor, repeat: int, dtype: torch.dtype) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill_(hidden, float("-inf"))
        if repeat > 1:
            mask = mask.repeat(1, repeat, 1)
        return mask[:, None]

    def _out_of_window(self, hidden: Tensor, window: int | None) -> Tensor:
        if window is None:
            return hidden
        assert self.key_positions is not None
        assert self.query_positions is not None
        return hidden | (self.key_positions <= self.query_positions[..., None] - window)


@dataclass(slots=True)
class RaggedBatch:
    """One forward pass: T rows of all sequences, one after the other.

    A row's entry (where its key is stored) follows from its table; `position_ids` is what the model is
    told. They agree for chains.
    """

    cache: PagedCache
    input_ids: Tensor
    """[1, T] int64."""
    position_ids: Tensor
    """[1, T] int64."""
    slots: Tensor
    """[T] int64: where the new keys and values go."""
    slot_range: tuple[int, int] | None
    """The same when they are consecutive."""
    logits_to_keep: int | Tensor
    """What transformers calls so: a count from the end, 0 meaning all rows, or an index [R]."""
    num_logits: int
    groups: list[AttentionGroup]
    unpack: Tensor | None
    """[T]: for each row its place among the groups' concatenated rows; None when it is the same."""

    _targets: list[Tensor] = field(default_factory=list)

    @classmethod
    def build(cls, inputs: Sequence[SequenceInput], cache: PagedCache) -> Self:
        """Lay out `inputs`, whose tables hold a reservation for their tokens."""
        if len(inputs) == 1:
            return cls._build_one(inputs[0], cache)
        return cls._build_many(inputs, cache)

    def write(self, layer: int, entries: Tensor) -> None:
        """Store the rows' entries, [T, width], in their slots."""
        if self.slot_range is None:
            self.cache.entries[layer].index_copy_(0, self.slots, entries)
            return
        if not self._targets:
            self._targets = self.cache.slots(*self.slot_range)
        self._targets[layer].copy_(entries)

    def write_heads(self, layer: int, key: Tensor, value: Tensor) -> None:
        """The same for a key and a value as models have them, [1, kv_heads, T, dim]."""
        for store, rows in ((self.cache.keys, key), (self.cache.values, value)):
            if self.slot_range is None:
                store[layer].index_copy_(0, self.slots, rows[0].transpose(0, 1))
            else:
                start, stop = self.slot_range
                store[layer][start:stop].copy_(rows[0].transpose(0, 1))

    @classmethod
    def _build_one(cls, item: SequenceInput, cache: PagedCache) -> Self:
        """The case every latency depends on: one sequence, as few tensors as it takes."""
        table, device = item.table, cache.device
        n, start = len(item.token_ids), item.table.length
        length = start + n
        base = table.contiguous_start(length)
        slots = slots_of(table, length) if base is None else None
        buffer = np.empty((3, n), dtype=np.int64)
        buffer[0] = item.token_ids
        buffer[1] = np.arange(start, length)
        if slots is not None:
            buffer[2] = slots[start:]
        tensor = _to(buffer, device)
        group = AttentionGroup(
            num_sequences=1,
            num_rows=n,
            num_keys=length,
            first_position=start,
            span=None,
            rows=None,
            slot_range=None if base is None else (base, base + length),
            gather=None if slots is None else _to(slots, device),
            query_positions=None,
            device=device,
        )
        return cls(
            cache=cache,
            input_ids=tensor[0:1],
            position_ids=tensor[1:2],
            slots=tensor[2],
            slot_range=None if base is None else (base + start, base + length),
            # 0 would keep all rows; one row too many is cheaper than an index, and is sliced off.
            logits_to_keep=max(item.num_logits, 1),
            num_logits=item.num_logits,
            groups=[group],
            unpack=None,
        )

    @classmethod
    def _build_many(cls, inputs: Sequence[SequenceInput], cache: PagedCache) -> Self:
        device = cache.device
        members = _Member.of(inputs)
        total = members[-1].offset + members[-1].count
        num_logits = sum(item.num_logits for item in inputs)
        parts = _Packer()
        ids = parts.add(np.concatenate([np.asarray(item.token_ids, dtype=np.int64) for item in inputs]))
        positions = parts.add(np.concatenate([np.arange(m.start, m.length) for m in members]))
        slots = parts.add(np.concatenate([m.slots(m.start, m.length) for m in members]))
        keep = None
        if num_logits not in {0, total}:
            ends = [(m.offset + m.count, item.num_logits) for m, item in zip(members, inputs, strict=True)]
            keep = parts.add(np.concatenate([np.arange(end - wanted, end) for end, wanted in ends]))

        groups = []
        unpack = np.empty(total, dtype=np.int64)
        placed = 0
        for group_members in _classes(members, alone=device.type == "cpu"):
            group, *indices = _group(group_members, device)
            groups.append((group, [None if array is None else parts.add(array) for array in indices]))
            for m in group_members:
                unpack[m.offset : m.offset + m.count] = np.arange(placed, placed + m.count)
                placed += group.num_rows
        in_order = placed == total and bool((unpack == np.arange(total)).all())
        unpack_part = None if in_order else parts.add(unpack)

        fetch = parts.send(device)
        for group, (rows, gather, query_positions) in groups:
            group.rows = None if rows is None else fetch[rows]
            group.gather = None if gather is None else fetch[gather]
            if query_positions is not None:
                group.query_positions = fetch[query_positions].view(group.num_sequences, group.num_rows)
        logits_to_keep: int | Tensor = 0
        if keep is not None:
            logits_to_keep = fetch[keep]
        elif num_logits == 0:
            logits_to_keep = 1
        return cls(
            cache=cache,
            input_ids=fetch[ids][None],
            position_ids=fetch[positions][None],
            slots=fetch[slots],
            slot_range=None,
            logits_to_keep=logits_to_keep,
            num_logits=num_logits,
            groups=[group for group, _ in groups],
            unpack=None if unpack_part is None else fetch[unpack_part],
        )


@dataclass(frozen=True, slots=True)
class _Member:
    """One sequence's place in a batch of several."""

    table: BlockTable
    offset: int
    """Its first row in the batch."""
    count: int
    start: int
    """The position of that row."""
    base: int | None
    """The slot of position 0, where the entries are contiguous."""

    @classmethod
    def of(cls, inputs: Sequence[SequenceInput]) -> list[_Member]:
        members, offset = [], 0
        for item in inputs:
            count, start = len(item.token_ids), item.table.length
            members.append(cls(item.table, offset, count, start, item.table.contiguous_start(start + count)))
            offset += count
        return members

    @property
    def length(self) -> int:
        """Entries once its rows are written."""
        return self.start + self.count

    def slots(self, start: int, stop: int) -> Indices:
        """Slots of positions [start, stop)."""
        if self.base is not None:
            return np.arange(self.base + start, self.base + stop)
        return slots_of(self.table, stop)[start:]


def _group(
    members: Sequence[_Member], device: torch.device
) -> tuple[AttentionGroup, Indices | None, Indices | None, Indices | None]:
    """The members' attention call, and its `rows`, `gather` and `query_positions` as arrays."""
    rows = max(m.count for m in members)
    keys = max(m.length for m in members)
    first = members[0]
    lone = len(members) == 1
    starts = np.array([m.offset for m in members])[:, None]
    # A padding row repeats the sequence's last one, a padding key its first.
    steps = np.minimum(np.arange(rows), np.array([m.count for m in members])[:, None] - 1)
    row_index = (starts + steps).ravel()
    consecutive = bool((row_index == np.arange(first.offset, first.offset + row_index.size)).all())
    gather = None
    if not lone or first.base is None:
        found = [m.slots(0, m.length) for m in members]
        gather = np.concatenate([np.pad(s, (0, keys - len(s)), constant_values=s[0]) for s in found])
    group = AttentionGroup(
        num_sequences=len(members),
        num_rows=rows,
        num_keys=keys,
        first_position=first.start,
        span=(first.offset, row_index.size) if consecutive else None,
        rows=None,
        slot_range=None if gather is not None or first.base is None else (first.base, first.base + keys),
        gather=None,
        query_positions=None,
        device=device,
    )
    positions = (np.array([m.start for m in members])[:, None] + steps).ravel()
    return group, None if consecutive else row_index, gather, None if lone else positions


class _Packer:
    """Many small index arrays, sent to the device in one transfer."""

    def __init__(self) -> None:
        self._arrays: list[Indices] = []

    def add(self, array: npt.NDArray[Any]) -> int:
        self._arrays.append(array)
        return len(self._arrays) - 1

    def send(self, device: torch.device) -> list[Tensor]:
        whole = _to(np.concatenate(self._arrays).astype(np.int64, copy=False), device)
        return list(torch.split(whole, [array.size for array in self._arrays]))


def _to(array: Indices, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device)


def slots_of(table: BlockTable, length: int) -> Indices:
    """Slots of positions [0, length), reserved ones included."""
    base = table.contiguous_start(length)
    if base is not None:
        return np.arange(base, base + length)
    size = table.pool.block_size
    blocks = np.array(table.blocks[: -(-length // size)], dtype=np.int64)
    slots: Indices = (blocks[:, None] * size + np.arange(size)).ravel()[:length]
    return slots


def _classes(members: Sequence[_Member], *, alone: bool) -> list[list[_Member]]:
    """The sequences that share an attention call, so that padding at most doubles the work.

    `alone` is for a device whose calls are cheap beside copying a cache: there a sequence that needs no
    gather has its own, unless it is short.
    """
    classes: dict[tuple[int, ...], list[_Member]] = {}
    for m in members:
        if m.count > _ALONE_ROWS or (alone and m.base is not None and m.length >= _ALONE_KEYS):
            classes[(m.offset,)] = [m]
        else:
            rows = 1 if m.count == 1 else max(3, (m.count - 1).bit_length())
            length_class = max(_SMALLEST_LENGTH_CLASS, m.length.bit_length())
            classes.setdefault((rows, length_class), []).append(m)
    return list(classes.values())
