"""How a draft tree grows where the target judges by ratios: every node is drawn. No tensors, no drafter.

Children of a node are drawn one after another without replacement: each from q renormalised over the tokens
that earlier siblings left, which is what is sent with it. The target judges them one after another
(decoding/trees.py). Its output has its own distribution as long as a try's place, its q and whether it is
made depend on what was drawn before alone, and everything drawn is sent in that order. So the places of a
level are planned before its rows are seen, and nothing is dropped, reordered or cut afterwards.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from draft_worker.sampling.growth import ROOT, Node, proposal_of
from paceline.core.types import Proposal, SparseDistribution, TreeShape

FIRST_SHARE: Final = math.log(0.6)
"""Logarithm of the prior acceptance of a node's first child."""
RANK_SHARE: Final = math.log(1 / 3)
"""The same of each further child, divided by that of the one before it."""

Array = npt.NDArray[Any]


@dataclass(slots=True, eq=False)
class DrawnNodes:
    """A tree of drawn tokens, which grows level by level.

    Every level gets the places that are among the likeliest of all that the tries left could fill, by prior
    acceptance of ranks, but at least one as long as there are tries.
    """

    depth: int
    shape: TreeShape
    uniforms: Sequence[float]
    """One for each try, in (0, 1)."""
    pool: list[Node] = field(default_factory=list)
    distributions: list[SparseDistribution] = field(default_factory=list)
    """What each node was drawn from."""
    wanted: list[int] = field(default_factory=list)
    """The nodes that children are drawn after next; none once the tree is complete."""
    _planned: dict[int, int] = field(default_factory=dict)
    """Number of children to draw after each wanted node."""

    def __post_init__(self) -> None:
        self._plan(0)

    @property
    def max_fed(self) -> int:
        """Most nodes that it wants, besides the root."""
        return self.shape.nodes

    def grow(self, rows: Sequence[SparseDistribution | None]) -> None:
        """Draw the planned children of the wanted nodes; none after a node without a distribution."""
        level = 1 + max(map(self.depth_of, self.wanted))
        for node, q in zip(self.wanted, rows, strict=True):
            if q is not None:
                self._draw_children(node, q, self._planned[node])
        self._plan(level)

    def depth_of(self, node: int) -> int:
        """Number of draft tokens up to a node."""
        return 0 if node == ROOT else self.pool[node].depth

    def _value_of(self, node: int) -> float:
        return 0.0 if node == ROOT else self.pool[node].value

    def proposal(self) -> Proposal:
        """Everything that was drawn, in that order."""
        drawn = proposal_of(self.pool, range(len(self.pool)))
        return Proposal(drawn.token_ids, drawn.parents, tuple(self.distributions))

    def _draw_children(self, node: int, q: SparseDistribution, count: int) -> None:
        if q.uniform_over:  # has no form without replacement
            last = q.uniform_over - 1
            self._add(node, 0, min(int(self.uniforms[len(self.pool)] * q.uniform_over), last), q)
            return
        ids, values = np.frombuffer(q.token_ids, "<u4"), np.frombuffer(q.probabilities, "<f4")
        for rank in range(count):
            if not values.any():
                break
            chosen = self._choose(values)
            sent = SparseDistribution(ids.tobytes(), values.tobytes())
            self._add(node, rank, int(ids[chosen]), sent)
            ids, values = np.delete(ids, chosen), np.delete(values, chosen)

    def _choose(self, values: Array) -> int:
        """The index drawn by the next try in proportion to float32 values, of which one is positive."""
        cumulative = values.astype(np.float64).cumsum()
        point = self.uniforms[len(self.pool)] * cumulative[-1]
        # Rounding may raise the point to the total itself, which no entry exceeds.
        return min(int(cumulative.searchsorted(point, "right")), int(values.nonzero()[0][-1]))

    def _add(self, node: int, rank: int, token_id: int, q: SparseDistribution) -> None:
        value = self._value_of(node) + FIRST_SHARE + rank * RANK_SHARE
        self.pool.append(Node(node, token_id, value, self.depth_of(node) + 1, rank))
        self.distributions.append(q)

    def _plan(self, level: int) -> None:
        """Divide the tries left: those of places right after the newest nodes are made next."""
        left, levels = self.shape.nodes - len(self.pool), self.depth - level
        newest = [i for i, node in enumerate(self.pool) if node.depth == level] if level else [ROOT]
        self._planned.clear()
        if left > 0 and levels > 0:
            for node in self._likeliest(newest, left, levels)[: max(1, left - levels + 1)]:
                self._planned[node] = self._planned.get(node, 0) + 1
        self.wanted = list(self._planned)

    def _likeliest(self, newest: Sequence[int], left: int, levels: int) -> list[int]:
        """The parents of the next level's places among the `left` likeliest of all, likeliest first."""
        places = [(-self._value_of(node) - FIRST_SHARE, 1, 0, node) for node in newest]
        heapq.heapify(places)
        parents = []
        for _ in range(left):
            if not places:
                break
            cost, depth, rank, node = heapq.heappop(places)
            if depth == 1:
                parents.append(node)
            if rank + 1 < self.shape.width:
                heapq.heappush(places, (cost - RANK_SHARE, depth, rank + 1, node))
            if depth < levels:
                heapq.heappush(places, (cost - FIRST_SHARE, depth + 1, 0, node))
        return parents
