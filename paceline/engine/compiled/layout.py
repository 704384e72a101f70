"""Which rows a pass has and what each one sees, as flat arrays of integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.engine.batch import Indices, SequenceInput, slots_of
from paceline.engine.branches import BranchInput
from paceline.engine.chains import ChainInput
from paceline.kv import BlockTable, Branch


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
        fed = np.array([len(item.token_ids) for item in inputs], dtype=np.int64)
        keys = [_keys_of(item.end, item.room) for item in inputs]
        firsts = np.cumsum([0, *(len(own) for own in keys[:-1])])
        starts = np.array([item.end.length for item in inputs], dtype=np.int64)
        last = np.cumsum(fed)
        # What each row is past the first one of its chain.
        within = np.arange(last[-1]) - np.repeat(last - fed, fed)
        positions, key_first, all_keys = (
            within + np.repeat(starts, fed),
            np.repeat(firsts, fed),
            np.concatenate(keys),
        )
        return cls(
            ids=np.array([token for item in inputs for token in item.token_ids], dtype=np.int64),
            positions=positions,
            slots=all_keys[key_first + positions],
            keys=all_keys,
            key_first=key_first,
            key_count=positions + 1,
            wanted=last - 1,
        )

    @classmethod
    def of_branches(cls, inputs: Sequence[BranchInput]) -> Layout:
        """One row a branch, each of which holds a reservation for its entry."""
        return cls.of_chains([ChainInput(item.branch, [item.token_id], 1) for item in inputs])


def _keys_of(end: BlockTable | Branch, more: int) -> Indices:
    """The slots of all entries and of the next `more`."""
    if isinstance(end, BlockTable):
        return slots_of(end, end.length + more)
    return np.concatenate([slots_of(end.of.trunk, end.kept), np.array(end.own_slots(more), dtype=np.int64)])
