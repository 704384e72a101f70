"""Which rows a pass has and what each one sees, as flat arrays of integers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.engine.batch import Indices, SequenceInput, slots_of
from paceline.engine.branches import BranchInput
from paceline.engine.multi_step import ChainInput
from paceline.kv import BlockTable


@dataclass(frozen=True, slots=True)
class Layout:
    """R rows; what row r sees are the slots keys[key_first[r]:][:key_count[r]], its own the last."""

    ids: Indices
    positions: Indices
    slots: Indices
    keys: Indices
    key_first: Indices
    key_count: Indices
    wanted: Indices
    """Rows whose logits are wanted."""

    @classmethod
    def of_sequences(cls, inputs: Sequence[SequenceInput]) -> Layout:
        """Rows of sequences whose tables hold a reservation for them."""
        if len(inputs) == 1:
            return cls._of_one(inputs[0])
        parts = [cls._of_one(item) for item in inputs]
        rows = np.cumsum([0, *(len(part.ids) for part in parts[:-1])])
        keys = np.cumsum([0, *(len(part.keys) for part in parts[:-1])])
        return cls(
            ids=np.concatenate([part.ids for part in parts]),
            positions=np.concatenate([part.positions for part in parts]),
            slots=np.concatenate([part.slots for part in parts]),
            keys=np.concatenate([part.keys for part in parts]),
            key_first=np.concatenate([part.key_first + at for part, at in zip(parts, keys, strict=True)]),
            key_count=np.concatenate([part.key_count for part in parts]),
            wanted=np.concatenate([part.wanted + at for part, at in zip(parts, rows, strict=True)]),
        )

    @classmethod
    def _of_one(cls, item: SequenceInput) -> Layout:
        start, count = item.table.length, len(item.token_ids)
        keys = slots_of(item.table, start + count)
        positions = np.arange(start, start + count)
        return cls(
            ids=np.array(item.token_ids, dtype=np.int64),
            positions=positions,
            slots=keys[start:],
            keys=keys,
            key_first=np.zeros(count, dtype=np.int64),
            key_count=positions + 1,
            wanted=np.arange(count - item.num_logits, count),
        )

    @classmethod
    def of_chains(cls, inputs: Sequence[ChainInput]) -> Layout:
        """Rows of the first step, and keys for all of them: each end holds a reservation for every step."""
        # Lists, for these are few numbers: each operation on arrays takes longer than a dozen of them.
        firsts = [0, *itertools.accumulate(item.end.length + item.room for item in inputs)]
        ids: list[int] = []
        positions: list[int] = []
        key_first: list[int] = []
        wanted: list[int] = []
        for item, first in zip(inputs, firsts, strict=False):
            start, count = item.end.length, len(item.token_ids)
            ids += item.token_ids
            positions += range(start, start + count)
            key_first += [first] * count
            wanted.append(len(ids) - 1)
        keys = _keys_of(inputs, firsts)
        at, begin = np.array(positions, dtype=np.int64), np.array(key_first, dtype=np.int64)
        return cls(
            ids=np.array(ids, dtype=np.int64),
            positions=at,
            slots=keys[begin + at],
            keys=keys,
            key_first=begin,
            key_count=at + 1,
            wanted=np.array(wanted, dtype=np.int64),
        )

    @classmethod
    def of_branches(cls, inputs: Sequence[BranchInput]) -> Layout:
        """One row a branch, each of which holds a reservation for its entry."""
        return cls.of_chains([ChainInput(item.branch, [item.token_id], 1) for item in inputs])


def _keys_of(inputs: Sequence[ChainInput], firsts: Sequence[int]) -> Indices:
    """The slots of all entries of each end and of those to come, beginning where `firsts` says."""
    keys = np.empty(firsts[-1], dtype=np.int64)
    below: dict[BlockTable, Indices] = {}
    for item, first, after in zip(inputs, firsts, firsts[1:], strict=False):
        end = item.end
        if isinstance(end, BlockTable):
            keys[first:after] = slots_of(end, after - first)
            continue
        trunk = end.of.trunk
        if trunk not in below:
            below[trunk] = slots_of(trunk, trunk.length)
        keys[first : first + end.kept] = below[trunk][: end.kept]
        keys[first + end.kept : after] = end.own_slots(item.room)
    return keys
