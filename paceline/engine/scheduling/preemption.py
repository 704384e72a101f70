"""Who gets the cache's free blocks when there are too few for all. A pure decision, but for the blocks moved.

Older sequences come first. When the rows of one find no room, the youngest one that holds blocks gives all
of its own back: it is preempted, and computed again from the ledger later. A sequence without any entry is
let in only if all that it has to feed finds room. So the oldest one always gets on, and no sequence is in
the way of an older one for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.engine.scheduling.sequences import HeldSequence


@dataclass(frozen=True, slots=True)
class Need:
    """What one sequence wants to feed in this pass."""

    held: HeldSequence[Any]
    count: int
    """Entries that it writes in this pass."""
    begins: int = 0
    """Entries that it must have room for altogether, if it has computed none yet; else 0."""

    @property
    def blocks(self) -> int:
        """Free blocks it takes."""
        return self.held.table.blocks_needed(max(self.count, self.begins))


def make_room(
    needs: Sequence[Need], all_held: Iterable[HeldSequence[Any]], spare: Callable[[], bool]
) -> list[HeldSequence[Any]]:
    """Preempt until the needs of all that keep their blocks fit together.

    Args:
        needs: of one pass; together they may be more than is free.
        all_held: every sequence that may hold blocks of the pool, those with needs among them.
        spare: gives back what is worth less than any sequence's blocks; False when there was nothing.

    Returns:
        The sequences that must do without, whose tables are empty; their needs are not part of the pass.
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
    """Take the youngest one with blocks from `holders`, which are in order of age; none as old as `age`."""
    while holders and holders[-1].age > age:
        held = holders.pop()
        if held.table.blocks:
            return held
    return None
