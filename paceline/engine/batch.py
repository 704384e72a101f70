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
    rows: Tensor | None
    """[S * num_rows] rows of the batch; None when they are all rows of the batch in order."""
    slot_range: tuple[int, int] | None
    """Slots of a single sequence whose entries are contiguous: a view, no gather."""
    gather: Tensor | None
    """[S * num_keys] slots otherwise. Padding repeats a slot of the same sequence, so that no other
    sequence's values, NaN above all, can reach its sums."""
    query_positions: Tensor | None
    """[S, num_rows] positions, padding repeating the last one; None when a single sequence has them all
    consecutive from `first_position`."""
    device: torch.device
    _plans: dict[tuple[int | None, int, torch.dtype], tuple[int, Tensor | None]] = field(default_factory=dict)

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
        if window is not None and window >= self.num_keys:
            window = None
        first = 0
        if self.slot_range is not None and window is not None:
            first = max(0, self.first_position - window + 1)
        if self.num_rows == 1 and self.num_sequences == 1 and (self.slot_range is not None or window is None):
            return first, None
        if self.num_sequences == 1 and window is None:
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
        mask = torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill_(hidden, float("-inf"))
        if repeat > 1:
            mask = mask.repeat(1, repeat, 1)
        return first, mask[:, None]


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

    @classmethod
    def build(cls, inputs: Sequence[SequenceInput], cache: PagedCache) -> Self:
        """Lay out `inputs`, whose tables hold a reservation for their tokens."""
        if len(inputs) == 1:
            return cls._build_one(inputs[0], cache)
        return cls._build_many(inputs, cache)

    @classmethod
    def _build_one(cls, item: SequenceInput, cache: PagedCache) -> Self:
        """The case every latency depends on: one sequence, as few tensors as it takes."""
        table, device = item.table, cache.device
        n, start = len(item.token_ids), item.table.length
        length = start + n
        base = table.contiguous_start(length)
        slots = _slots(table, length) if base is None else None
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
        counts = [len(item.token_ids) for item in inputs]
        starts = [item.table.length for item in inputs]
        offsets = np.cumsum([0, *counts])
        total = int(offsets[-1])
        slots = [_slots(item.table, start + n) for item, start, n in zip(inputs, starts, counts, strict=True)]

        parts = _Packer()
        ids = parts.add(np.concatenate([np.asarray(item.token_ids, dtype=np.int64) for item in inputs]))
        positions = np.concatenate(
            [np.arange(start, start + n) for start, n in zip(starts, counts, strict=True)]
        )
        position_part = parts.add(positions)
        slot_part = parts.add(np.concatenate([s[start:] for s, start in zip(slots, starts, strict=True)]))
        wanted = [
            np.arange(offsets[i + 1] - item.num_logits, offsets[i + 1]) for i, item in enumerate(inputs)
        ]
        num_logits = sum(item.num_logits for item in inputs)
        keep = None if num_logits in {0, total} else parts.add(np.concatenate(wanted))

        plans = []
        unpack = np.empty(total, dtype=np.int64)
        placed = 0
        for members in _classes(counts, starts):
            rows = max(counts[i] for i in members)
            keys = max(starts[i] + counts[i] for i in members)
            query_rows = np.empty((len(members), rows), dtype=np.int64)
            gather = np.empty((len(members), keys), dtype=np.int64)
            for j, i in enumerate(members):
                n, length = counts[i], starts[i] + counts[i]
                query_rows[j, :n] = range(offsets[i], offsets[i + 1])
                query_rows[j, n:] = offsets[i + 1] - 1
                gather[j, :length] = slots[i]
                gather[j, length:] = slots[i][0]
                unpack[offsets[i] : offsets[i + 1]] = range(placed, placed + n)
                placed += rows
            base = inputs[members[0]].table.contiguous_start(keys) if len(members) == 1 else None
            in_order = query_rows.size == total and bool((query_rows.ravel() == np.arange(total)).all())
            plans.append(
                (
                    AttentionGroup(
                        num_sequences=len(members),
                        num_rows=rows,
                        num_keys=keys,
                        first_position=starts[members[0]],
                        rows=None,
                        slot_range=None if base is None else (base, base + keys),
                        gather=None,
                        query_positions=None,
                        device=device,
                    ),
                    None if in_order else parts.add(query_rows.ravel()),
                    None if base is not None else parts.add(gather.ravel()),
                    None if len(members) == 1 else parts.add(positions[query_rows].ravel()),
                )
            )
        in_order = len(plans) == 1 and plans[0][1] is None
        unpack_part = None if in_order else parts.add(unpack)

        fetch = parts.send(device)
        for group, rows_part, gather_part, positions_part in plans:
            group.rows = None if rows_part is None else fetch[rows_part]
            group.gather = None if gather_part is None else fetch[gather_part]
            if positions_part is not None:
                group.query_positions = fetch[positions_part].view(group.num_sequences, group.num_rows)
        logits_to_keep: int | Tensor = 0
        if keep is not None:
            logits_to_keep = fetch[keep]
        elif num_logits == 0:
            logits_to_keep = 1
        return cls(
            cache=cache,
            input_ids=fetch[ids][None],
            position_ids=fetch[position_part][None],
            slots=fetch[slot_part],
            slot_range=None,
            logits_to_keep=logits_to_keep,
            num_logits=num_logits,
            groups=[plan[0] for plan in plans],
            unpack=None if unpack_part is None else fetch[unpack_part],
        )


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


def _slots(table: BlockTable, length: int) -> Indices:
    """Slots of positions [0, length)."""
    size = table.pool.block_size
    blocks = np.array(table.blocks[: -(-length // size)], dtype=np.int64)
    slots: Indices = (blocks[:, None] * size + np.arange(size)).ravel()[:length]
    return slots


def _classes(counts: Sequence[int], starts: Sequence[int]) -> list[list[int]]:
    """Indices of the sequences that share an attention call, so that padding at most doubles the work."""
    classes: dict[tuple[int, ...], list[int]] = {}
    for i, (n, start) in enumerate(zip(counts, starts, strict=True)):
        if n > _ALONE_ROWS:
            classes[(i,)] = [i]
        else:
            rows = 1 if n == 1 else max(3, (n - 1).bit_length())
            classes.setdefault((rows, max(_SMALLEST_LENGTH_CLASS, (start + n).bit_length())), []).append(i)
    return list(classes.values())
