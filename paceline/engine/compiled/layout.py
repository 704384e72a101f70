"""Which rows a pass has and what each one sees, as flat arrays of integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.engine.batch import Indices, SequenceInput, slots_of
from paceline.engine.branches import BranchInput
from paceline.engine.chains import ChainInput


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
        """Rows of the first step, and keys for all of them: tables hold a reservation for every step."""
        lengths = np.array([item.table.length for item in inputs], dtype=np.int64)
        keys = [slots_of(item.table, item.table.length + item.steps) for item in inputs]
        return cls(
            ids=np.array([item.token_id for item in inputs], dtype=np.int64),
            positions=lengths.copy(),
            slots=np.array([own[n] for own, n in zip(keys, lengths, strict=True)], dtype=np.int64),
            keys=np.concatenate(keys),
            key_first=np.cumsum([0, *(len(own) for own in keys[:-1])]),
            key_count=lengths + 1,
            wanted=np.arange(len(inputs)),
        )

    @classmethod
    def of_branches(cls, inputs: Sequence[BranchInput], places: Sequence[int]) -> Layout:
        """One row a branch; `places`: where in its sequence's region each row's entry goes."""
        rows: list[Indices] = []
        for item, place in zip(inputs, places, strict=True):
            of = item.branch.of
            own = [of.slots[p] for p in (*item.branch.own, place)]
            rows.append(np.concatenate([slots_of(of.trunk, item.branch.kept), np.array(own, dtype=np.int64)]))
        counts = np.array([len(row) for row in rows], dtype=np.int64)
        return cls(
            ids=np.array([item.token_id for item in inputs], dtype=np.int64),
            positions=np.array([item.branch.length for item in inputs], dtype=np.int64),
            slots=np.array([row[-1] for row in rows], dtype=np.int64),
            keys=np.concatenate(rows),
            key_first=np.cumsum(counts) - counts,
            key_count=counts,
            wanted=np.arange(len(inputs)),
        )
