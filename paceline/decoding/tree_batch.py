"""Acceptance of many draft trees at once, in tensors and without waiting for their device.

Every row is judged as if its path were accepted: the tries after all rows, first the first ones, then the
second ones, and so on. The host then walks each tree from its root. The decisions are those of
`trees.accept_tree_rejection`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.decoding.cpu.distributions import RESIDUAL_FLOOR
from paceline.decoding.sampling import draw
from paceline.decoding.transfer import to_device


@dataclass(frozen=True, slots=True)
class TreeTries:
    """T tries after R rows of some trees."""

    rows: Sequence[int]
    """The row after which each try was drawn."""
    token_ids: Sequence[int]
    """The token of each."""

    def ranks(self) -> list[list[int]]:
        """The tries by their place among those after the same row, each list in order."""
        seen: dict[int, int] = {}
        ranks: list[list[int]] = []
        for number, row in enumerate(self.rows):
            rank = seen[row] = seen.get(row, -1) + 1
            if rank == len(ranks):
                ranks.append([])
            ranks[rank].append(number)
        return ranks


def judge_rows(
    tries: TreeTries, p: Tensor, q: Tensor, accept_u: Tensor, next_u: Tensor
) -> tuple[Tensor, Tensor]:
    """What follows each row: a try that is accepted, or else the next token.

    Args:
        tries: T tries; those after one row in the order in which they are judged.
        p: float64 [R, V], rows sum to 1: the target's distribution after each row. Changed in place.
        q: float64 [T, V], rows sum to 1: the distribution each try was drawn from.
        accept_u: float64 [T], uniform in (0, 1), on the host.
        next_u: float64 [R], likewise.

    Returns:
        int64 [R] twice, on the device of p: the accepted try, -1 for none; the token drawn where none is.
    """
    ranks = tries.ranks()
    order = [number for rank in ranks for number in rank]
    columns = np.array([order, [tries.rows[n] for n in order], [tries.token_ids[n] for n in order]])
    numbers = to_device(torch.from_numpy(columns.astype(np.int64).reshape(3, -1)), p.device)
    u = to_device(torch.cat([accept_u[order], next_u]), p.device)
    accepted = torch.full((len(p),), -1, dtype=torch.int64, device=p.device)
    start = 0
    for rank in ranks:
        stop = start + len(rank)
        number, row, token = numbers[:, start:stop]
        current, drawn_from = p[row], q[number]
        tested = u[start:stop] * drawn_from.gather(1, token[:, None])[:, 0]
        passed = tested < current.gather(1, token[:, None])[:, 0]
        is_open = accepted[row] < 0
        accepted[row] = torch.where(is_open & passed, number, accepted[row])
        left = (current - drawn_from).clamp_(min=0.0)
        total = left.sum(1)
        changed = is_open & ~passed & (total > RESIDUAL_FLOOR)
        p[row] = torch.where(changed[:, None], left / total[:, None], current)
        start = stop
    return accepted, draw(p, u[start:])
