"""One attention call: its rows, their keys, and the mask."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.engine.cache import PagedCache


@dataclass(slots=True)
class AttentionGroup:
    """Sequences that share one attention call, padded to `num_rows` rows and `num_keys` keys each."""

    num_sequences: int
    num_rows: int
    num_keys: int
    first_position: int
    """Position of the first row if the group is a single sequence."""
    span: tuple[int, int] | None
    """(first, count) of consecutive rows of the batch. If this and `rows` are None, all rows in order."""
    rows: Tensor | None
    """[S * num_rows] rows of the batch."""
    slot_range: tuple[int, int] | None
    """Slots of a single sequence whose entries are contiguous: a view, no gather."""
    gather: Tensor | None
    """[S * num_keys] slots otherwise. Padding repeats a slot of the same sequence, so that no value of
    another sequence, in particular NaN, can reach its sums."""
    query_positions: Tensor | None
    """[S, num_rows] positions, padding repeating the last one; None if a single sequence has consecutive
    positions from `first_position`."""
    device: torch.device
    hidden: Tensor | None = None
    """[S, num_rows, num_keys] bool for rows of trees and branches, whose visible keys do not follow from
    positions."""
    key_positions: Tensor | None = None
    """Positions of the keys of such rows: [num_keys], or [S, 1, num_keys]."""
    fixed: bool = False
    """The call is recorded and serves other batches of its shape: nothing in it may depend on this batch's
    numbers except through its tensors."""
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
        """First key that any row sees, and an additive mask; None if every row sees every key from there on.

        The mask is [S, 1, repeat * num_rows, num_keys - first]: the query heads of one key-value head are
        folded into rows, `repeat` times over. The first layer builds the mask; the others share it.
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
            # Only the corner where the new rows meet their own keys is partly masked.
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
