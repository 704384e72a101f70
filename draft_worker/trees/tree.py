"""One tree of draft tokens, with the drafter's state of every node that was fed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from draft_worker.drafters.interface import BranchRegion, BranchState
from draft_worker.sampling.draw import Drawn
from draft_worker.sampling.growth import ROOT, Growth, Row, path_of
from draft_worker.sampling.partial_draft import PartialDraft


class NodeFeed(NamedTuple):
    """A node to feed: the drafter's state after its parent, and the draft that ends with it."""

    state: BranchState
    draft: PartialDraft


@dataclass(slots=True, eq=False)
class DraftTree:
    """Grows from the newest token of a ledger, which the drafter has taken in."""

    sequence_id: str
    root: PartialDraft
    """The draft without draft tokens."""
    growth: Growth
    region: BranchRegion | None
    """Holds the states; None once it was freed, after which the tree is complete as it stands."""
    states: dict[int, BranchState] = field(default_factory=dict)
    """By node; that of the root is the sequence itself."""

    @property
    def complete(self) -> bool:
        """True if no node is to be fed."""
        return not self.growth.wanted

    def feeds(self) -> list[NodeFeed]:
        """The wanted nodes."""
        pool = self.growth.pool
        found = []
        for node in self.growth.wanted:
            above = self.states[pool[node].parent]
            drawn = list(map(Drawn, path_of(pool, node)))
            found.append(NodeFeed(above.cut(above.length), replace(self.root, drawn=drawn)))
        return found

    def take(self, states: Sequence[BranchState], rows: Sequence[Row | None]) -> None:
        """The wanted nodes were fed: their states, and what may follow them.

        A state whose row is no distribution is not kept: its entry may be damaged.
        """
        wanted = self.growth.wanted
        self.states |= {n: s for n, s, row in zip(wanted, states, rows, strict=True) if row is not None}
        self.growth.grow(rows)

    def stop(self) -> None:
        """Leave it as it stands."""
        self.growth.wanted = []

    def free(self) -> None:
        """Give back what the states take."""
        self.stop()
        self.states.clear()
        if self.region is not None:
            self.region.free()
            self.region = None

    def deepest(self, ledger: Sequence[int]) -> BranchState | None:
        """The state after most tokens of a later ledger, of which the newest is not looked at.

        None if no draft token that was fed is in it.
        """
        children = {(node.parent, node.token_id): i for i, node in enumerate(self.growth.pool)}
        at = ROOT
        for token in ledger[len(self.root.ledger) : -1]:
            following = children.get((at, token), ROOT)
            if following == ROOT or following not in self.states:
                break
            at = following
        return None if at == ROOT else self.states[at]
