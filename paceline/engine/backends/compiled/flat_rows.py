"""The rows of a pass in the form of the compiled functions: flat arrays of integers."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from paceline.engine.layout import Indices, PassLayout


class FlatRows(NamedTuple):
    """R rows; row r sees the slots keys[key_first[r]:][:key_count[r]], of which its own is the last.

    The fields stand in the order in which the compiled functions take them.
    """

    ids: Indices
    positions: Indices
    slots: Indices
    keys: Indices
    """For a chain, those of all its steps."""
    key_first: Indices
    key_count: Indices
    wanted: Indices
    """Rows whose logits are wanted."""

    @classmethod
    def of(cls, layout: PassLayout) -> FlatRows:
        """The rows of `layout`."""
        ids, positions, slots = layout.rows
        sequences = layout.sequences
        if len(sequences) == 1:
            keys = sequences[0].slots(0, sequences[0].length)
            first = np.zeros(len(ids), dtype=np.int64)
        else:
            lengths = [s.length for s in sequences]
            firsts = np.array([0, *itertools.accumulate(lengths)], dtype=np.int64)
            keys = np.empty(firsts[-1], dtype=np.int64)
            for s, at in zip(sequences, firsts.tolist(), strict=False):
                after, shared = at + s.length, at + s.shared
                keys[at:shared] = s.slots_in_table(0, s.shared)
                if s.own:
                    keys[shared:after] = s.own
            first = firsts[:-1].repeat([s.count for s in sequences])
        return cls(ids, positions, slots, keys, first, positions + 1, layout.wanted)
