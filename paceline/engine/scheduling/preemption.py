"""Distributes the cache's free blocks when there are too few. A pure decision, except for moving the blocks.

Older sequences come first. If the rows of a sequence find no room, the youngest sequence with blocks is
preempted: it releases all of its blocks and is computed again from the ledger later. A sequence without
entries is admitted only if all of its tokens find room. Therefore the oldest sequence always makes progress,
and no sequence blocks an older one forever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.engine.scheduling.sequences import HeldSequence


@dataclass(frozen=True, slots=True)
class Need:
    """The blocks that one sequence needs in this pass."""

    held: HeldSequence[Any]
    count: int
    """Number of entries that it writes in this pass."""
    begins: int = 0
    """Number of entries that must fit in all, if it has computed none yet; else 0."""

    @property
    def blocks(self) -> int:
        """Number of free blocks that it takes."""
        return self.held.table.blocks_needed(max(self.count, self.begins))


def make_room(
    needs: Sequence[Need], all_held: Iterable[HeldSequence[Any]], spare: Callable[[], bool]
) -> list[HeldSequence[Any]]:
    """Preempt until the needs of all sequences that keep their blocks fit together.

    Args:
        needs: the needs of one pass; their sum may exceed the free blocks.
        all_held: every sequence that may hold blocks of the pool, including those with needs.
        spare: releases blocks of less value than any sequence's; False if there were none.

    Returns:
        The preempted or refused sequences, with empty tables; their needs are not part of the pass.
    """
    if not needs:
        return []
    pool = needs[0].held.table.pool
    if sum(need.blocks for need in needs) <= pool.free_blocks or (
        spare() and sum(need.blocks for need in needs) <= pool.free_blocks
    ):
        return []
    preempted: list[HeldSequence[Any]] = []
    holders = sorted(all_held, key=lambda held: held.age)
    taken = 0
    for need in sorted(needs, key=lambda need: need.held.age):
        if any(need.held is held for held in preempted):
            continue
        fits = taken + need.blocks <= pool.free_blocks
        while not fits:
            victim = _youngest(holders, need.held.age) or need.held
            victim.cut_to(0)
            preempted.append(victim)
            if victim is need.held:
                break
            fits = taken + need.blocks <= pool.free_blocks
        taken += need.blocks if fits else 0
    return preempted


def _youngest(holders: list[HeldSequence[Any]], age: int) -> HeldSequence[Any] | None:
    """Remove the youngest sequence with blocks from `holders`, in order of age; none as old as `age`."""
    while holders and holders[-1].age > age:
        held = holders.pop()
        if held.table.blocks:
            return held
    return None
