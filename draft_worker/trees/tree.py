"""One tree of draft tokens, with the drafter's state of every node that was fed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from draft_worker.drafters.interface import BranchRegion, BranchState
from draft_worker.sampling.draw import Drawn
from draft_worker.sampling.growth import ROOT, BestNodes, Growth, Row, path_of
from draft_worker.sampling.partial_draft import PartialDraft
from paceline.core.types import Proposal, SparseDistribution, TreeShape


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
    above: BranchState | None = None
    """The state before the ledger's newest token, if that is fed with the tree."""
    room: int = 0
    """Places of the region that the tree itself does not need."""
    sent: list[int] = field(default_factory=list)
    """The nodes of the answered proposal, in order."""

    @property
    def complete(self) -> bool:
        """True if no node is to be fed."""
        return not self.growth.wanted

    def feeds(self, nodes: Sequence[int] | None = None) -> list[NodeFeed]:
        """The wanted nodes, or some others."""
        pool, found = self.growth.pool, []
        for node in self.growth.wanted if nodes is None else nodes:
            above = self.above if node == ROOT else self.states[pool[node].parent]
            assert above is not None
            drawn = list(map(Drawn, path_of(pool, node)))
            found.append(NodeFeed(above.cut(above.length), replace(self.root, drawn=drawn)))
        return found

    def take(self, states: Sequence[BranchState], rows: Sequence[Row | None]) -> None:
        """The wanted nodes were fed: their states, and what may follow them."""
        self._keep(self.growth.wanted, states, rows)
        self.growth.grow(rows)

    def take_leaves(
        self, nodes: Sequence[int], states: Sequence[BranchState], rows: Sequence[Row | None]
    ) -> None:
        """Nodes of the complete tree were fed: what may follow them joins the pool, but not the tree."""
        assert isinstance(self.growth, BestNodes)
        self._keep(nodes, states, rows)
        for node, row in zip(nodes, rows, strict=True):
            assert row is None or not isinstance(row, SparseDistribution)
            self.growth.add(node, row or ())

    def _keep(self, nodes: Sequence[int], states: Sequence[BranchState], rows: Sequence[Row | None]) -> None:
        """Keep states, except where the row is no distribution: that entry may be damaged."""
        self.states |= {n: s for n, s, row in zip(nodes, states, rows, strict=True) if row is not None}

    def answer(self, depth: int, shape: TreeShape) -> Proposal:
        """The proposal: all of the tree, or of one that was drafted ahead its nodes up to the first beyond.

        Cutting is right where the target decides, and the coordinator cuts continuations in the same way.
        """
        growth, whole = self.growth, self.growth.proposal()
        if not isinstance(growth, BestNodes):
            return whole
        best = growth.best()
        deep = (i for i, node in enumerate(best) if growth.pool[node].depth > depth)
        self.sent = best[: min(next(deep, len(best)), shape.nodes)]
        return whole.first(len(self.sent))

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
