"""One pass over branches: rows of a tree, each seeing its own ancestors only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.engine.batch import AttentionGroup, RaggedBatch
from paceline.engine.cache import PagedCache
from paceline.kv.branches import Branch


@dataclass(frozen=True, slots=True)
class BranchInput:
    """Feed `token_id` at the end of `branch`; the logits of the row are wanted."""

    branch: Branch
    token_id: int


@torch.inference_mode()
def build(inputs: Sequence[BranchInput], cache: PagedCache) -> RaggedBatch:
    """Lay out one row a branch, which holds a reservation for it; those of one sequence stand together."""
    device, places = cache.device, [item.branch.room[0] for item in inputs]
    positions = np.array([item.branch.length for item in inputs], dtype=np.int64)
    slots = np.array(
        [item.branch.of.slots[place] for item, place in zip(inputs, places, strict=True)], dtype=np.int64
    )
    ids = np.array([item.token_id for item in inputs], dtype=np.int64)
    rows = torch.from_numpy(np.stack([ids, positions, slots])).to(device)
    groups = []
    first = 0
    for _, members in itertools.groupby(range(len(inputs)), key=lambda i: id(inputs[i].branch.of)):
        indices = list(members)
        chosen = [inputs[i].branch for i in indices]
        groups.append(_group(chosen, [places[i] for i in indices], positions[indices], first, cache))
        first += len(indices)
    if len(groups) == 1:
        groups[0].span = None
    return RaggedBatch(
        cache=cache,
        input_ids=rows[0:1],
        position_ids=rows[1:2],
        slots=rows[2],
        slot_range=None,
        logits_to_keep=0,
        num_logits=len(inputs),
        groups=groups,
        unpack=None,
    )


def _group(
    branches: Sequence[Branch],
    places: Sequence[int],
    positions: np.ndarray[tuple[int], np.dtype[np.int64]],
    first: int,
    cache: PagedCache,
) -> AttentionGroup:
    """The rows of one sequence over the entries any of them sees: the table's, then the region's."""
    of = branches[0].of
    shared = max(branch.kept for branch in branches)
    keys = shared + of.used
    hidden = np.ones((len(branches), keys), dtype=bool)
    key_positions = np.arange(keys, dtype=np.int64)
    for row, (branch, place) in enumerate(zip(branches, places, strict=True)):
        hidden[row, : branch.kept] = False
        own = [shared + p for p in (*branch.own, place)]
        hidden[row, own] = False
        key_positions[own] = range(branch.kept, branch.length + 1)
    device = cache.device
    slots = np.array(of.trunk.slots(0, shared) + of.slots[: of.used], dtype=np.int64)
    # What nobody sees may hold no numbers, and 0 times none is none.
    unseen = hidden.all(axis=0)
    slots[unseen] = slots[unseen.argmin()]
    return AttentionGroup(
        num_sequences=1,
        num_rows=len(branches),
        num_keys=keys,
        first_position=int(positions[0]),
        span=(first, len(branches)),
        rows=None,
        slot_range=None,
        gather=torch.from_numpy(slots).to(device),
        query_positions=torch.from_numpy(positions)[None].to(device),
        device=device,
        hidden=torch.from_numpy(hidden)[None].to(device),
        key_positions=torch.from_numpy(key_positions).to(device),
    )
