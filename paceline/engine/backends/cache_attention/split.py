"""A pass some of whose sequences have entries of their own: these are gathered, the others read in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from paceline.engine.backends.cache_attention.gathered import GATHERED
from paceline.engine.backends.cache_attention.interface import CacheAttention, Packer, PassAttention
from paceline.engine.cache import PagedCache
from paceline.engine.layout import Indices, PassLayout, SequenceRows


@dataclass(frozen=True, slots=True)
class _SplitPass:
    parts: Sequence[tuple[PassAttention, Tensor]]
    """Each with the rows of the pass that it computes, int64 [n]."""
    places: Tensor
    """int64 [T]: the place of each row among the parts' concatenated rows."""

    def attend(
        self, cache: PagedCache, layer: int, query: Tensor, scaling: float | None, softcap: float | None
    ) -> Tensor:
        """See `PassAttention`."""
        found = [
            part.attend(cache, layer, query.index_select(0, rows), scaling, softcap)
            for part, rows in self.parts
        ]
        return torch.cat(found).index_select(0, self.places)


def lay_out_split(
    layout: PassLayout, cache: PagedCache, parts: Packer, in_place: CacheAttention
) -> Callable[[Sequence[Tensor]], PassAttention]:
    """`CacheAttention.lay_out` for a pass with branches or trees."""
    gathered = [s for s in layout.sequences if s.own]
    others = [s for s in layout.sequences if not s.own]
    if not others:
        return GATHERED.lay_out(layout, cache, parts)
    rows = [_rows_of(sequences) for sequences in (others, gathered)]
    made = [
        attention.lay_out(_of(layout, sequences, own), cache, parts)
        for attention, sequences, own in zip((in_place, GATHERED), (others, gathered), rows, strict=True)
    ]
    # Where a row comes out is the inverse of the order in which the parts compute the rows.
    sent = [parts.add(own) for own in rows]
    places = parts.add(np.argsort(np.concatenate(rows)))

    def whole(arrays: Sequence[Tensor]) -> PassAttention:
        both = [(make(arrays), arrays[own]) for make, own in zip(made, sent, strict=True)]
        return _SplitPass(both, arrays[places])

    return whole


def _rows_of(sequences: Sequence[SequenceRows]) -> Indices:
    return np.concatenate([np.arange(s.first, s.first + s.count) for s in sequences])


def _of(
    layout: PassLayout,
    sequences: Sequence[SequenceRows],
    rows: Indices,
) -> PassLayout:
    """The pass of some sequences alone, whose rows then have other numbers."""
    firsts = np.cumsum([0, *(s.count for s in sequences)])
    renumbered = [replace(s, first=int(first)) for s, first in zip(sequences, firsts, strict=False)]
    return PassLayout(layout.rows[:, rows], renumbered, np.arange(len(rows)))
