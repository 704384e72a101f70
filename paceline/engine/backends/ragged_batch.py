"""A pass as the torch backends run it: rows side by side, and the keys of each attention call.

Linear layers see the real rows only. Padding exists only inside attention, where sequences with similar
numbers of rows and keys share one call. The batch is derived from a `PassLayout` once per pass and used by
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

from paceline.decoding.transfer import to_device
from paceline.engine.backends.attention_group import AttentionGroup
from paceline.engine.cache import PagedCache
from paceline.engine.layout import Indices, PassLayout, SequenceRows

_ALONE_ROWS: Final = 32
"""A sequence with more rows than this (a prefill chunk) gets its own attention call."""
_ALONE_KEYS: Final = 64
"""On a CPU, so does a sequence of at least this many contiguous keys: a copy takes longer than a call."""
_SMALLEST_LENGTH_CLASS: Final = 8
"""Sequences of up to 2^8 keys share a call; longer ones share it within a factor of two."""


@dataclass(slots=True)
class RaggedBatch:
    """One forward pass: T rows of all sequences, one after the other."""

    cache: PagedCache
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
    groups: list[AttentionGroup]
    unpack: Tensor | None
    """[T]: the place of each row among the groups' concatenated rows; None if it is the same."""

    _targets: list[Tensor] = field(default_factory=list)

    @classmethod
    def build(cls, layout: PassLayout, cache: PagedCache) -> Self:
        """Transfer `layout` to the cache's device."""
        if len(layout.sequences) == 1 and not layout.sequences[0].own:
            return cls._build_one(layout, cache)
        return cls._build_many(layout, cache)

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
        start, length, base = sequence.start, sequence.stop, sequence.base
        rows, count = _to(layout.rows, cache.device), _count_to_keep(layout)
        group = AttentionGroup(
            num_sequences=1,
            num_rows=sequence.count,
            num_keys=length,
            first_position=start,
            span=None,
            rows=None,
            slot_range=None if base is None else (base, base + length),
            gather=None if base is not None else _to(sequence.slots(0, length), cache.device),
            query_positions=None,
            device=cache.device,
        )
        return cls(
            cache=cache,
            input_ids=rows[0:1],
            position_ids=rows[1:2],
            slots=rows[2],
            slot_range=None if base is None else (base + start, base + length),
            logits_to_keep=_to(layout.wanted, cache.device) if count is None else count,
            num_logits=len(layout.wanted),
            groups=[group],
            unpack=None,
        )

    @classmethod
    def _build_many(cls, layout: PassLayout, cache: PagedCache) -> Self:
        device = cache.device
        total = layout.rows.shape[1]
        parts = _Packer()
        rows = parts.add(layout.rows.ravel())
        count = _count_to_keep(layout)
        wanted = 0 if count is not None else parts.add(layout.wanted)
        calls = []
        unpack = np.empty(total, dtype=np.int64)
        placed = 0
        for members in _classes(layout.sequences, alone=device.type == "cpu"):
            call = _call(members, device)
            calls.append((call.group, [None if a is None else parts.add(a) for a in call.indices]))
            for m, at in zip(members, call.places, strict=True):
                unpack[m.first : m.first + m.count] = np.arange(placed + at, placed + at + m.count)
            placed += call.size
        in_order = placed == total and bool((unpack == np.arange(total)).all())
        unpack_part = None if in_order else parts.add(unpack)

        fetch = parts.send(device)
        for group, (chosen, gather, query_positions, key_positions) in calls:
            group.rows = None if chosen is None else fetch[chosen]
            group.gather = None if gather is None else fetch[gather]
            group.key_positions = None if key_positions is None else fetch[key_positions]
            if query_positions is not None:
                group.query_positions = fetch[query_positions].view(group.num_sequences, group.num_rows)
        tokens = fetch[rows].view(3, total)
        return cls(
            cache=cache,
            input_ids=tokens[0:1],
            position_ids=tokens[1:2],
            slots=tokens[2],
            slot_range=None,
            logits_to_keep=fetch[wanted] if count is None else count,
            num_logits=len(layout.wanted),
            groups=[group for group, _ in calls],
            unpack=None if unpack_part is None else fetch[unpack_part],
        )


def _count_to_keep(layout: PassLayout) -> int | None:
    """Rows from the end whose logits are computed, 0 meaning all; None if others are wanted.

    With no wanted rows it is one too many, which is cheaper than an index and is sliced off.
    """
    total, wanted = layout.rows.shape[1], layout.wanted
    count = len(wanted)
    if count == total:
        return 0
    return max(count, 1) if not count or wanted[0] == total - count else None


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
    longest = max(members, key=lambda m: m.shared)
    shared = longest.shared
    columns: dict[int, int] = {}
    for m in members:
        for slot in m.own[: m.stop - m.shared]:
            columns.setdefault(slot, shared + len(columns))
    # One entry a row: where its branch leaves the table, its row of the batch, its position.
    leaves: list[int] = []
    chosen: list[int] = []
    positions: list[int] = []
    places: list[int] = []
    # One entry for each of a branch's own entries that a row sees.
    seen_by: list[int] = []
    seen: list[int] = []
    seen_at: list[int] = []
    for m in members:
        places.append(len(chosen))
        own = [columns[slot] for slot in m.own[: m.stop - m.shared]]
        for row in range(m.count):
            sees = own[: m.start + row + 1 - m.shared]
            seen_by += [len(chosen)] * len(sees)
            seen += sees
            seen_at += range(m.shared, m.shared + len(sees))
            leaves.append(m.shared)
            chosen.append(m.first + row)
            positions.append(m.start + row)
    keys, rows = shared + len(columns), len(chosen)
    key_positions = np.arange(keys)
    hidden = key_positions >= np.array(leaves)[:, None]
    hidden[seen_by, seen] = False
    key_positions[seen] = seen_at
    consecutive = chosen[-1] - chosen[0] == rows - 1
    group = AttentionGroup(
        num_sequences=1,
        num_rows=rows,
        num_keys=keys,
        first_position=positions[0],
        span=(chosen[0], rows) if consecutive else None,
        rows=None,
        slot_range=None,
        gather=None,
        query_positions=None,
        device=device,
        hidden=to_device(torch.from_numpy(hidden)[None], device),
    )
    gather = np.concatenate([longest.slots(0, shared), np.array(list(columns), dtype=np.int64)])
    indices = None if consecutive else np.array(chosen, dtype=np.int64), gather
    return _Call(group, rows, places, (*indices, np.array(positions, dtype=np.int64), key_positions))


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
    return to_device(torch.from_numpy(array), device)


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
