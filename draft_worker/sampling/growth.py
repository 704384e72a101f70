"""How a draft tree grows where the target's own choice decides every token: by value. No tensors, no drafter.

The value of a node is the probability that the target's tokens pass through it, as far as the draft knows. A
child's is that of its parent times softmax(score + noise) of its token. (score + noise itself is no
likelihood: its maximum has the same law whatever the scores are.) Values fall along a path, so the best nodes
of a pool are a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from paceline.core.types import Proposal, SparseDistribution, TreeShape

ROOT: Final = -1
"""The newest token of the ledger, as the parent of the first nodes."""


class NextToken(NamedTuple):
    """A token that may follow a node."""

    token_id: int
    log_share: float
    """log softmax(score + noise) of the token, over the permitted tokens."""


Row = Sequence[NextToken] | SparseDistribution
"""What may follow a node: the best tokens, best first; or what its children are drawn from."""


class Node(NamedTuple):
    """A draft token of a tree. A pool of them is a list in which parents come before their children."""

    parent: int
    token_id: int
    value: float
    """A logarithm, so that deep nodes have one."""
    depth: int
    rank: int
    """Of its token among those that may follow its parent."""


class Growth(Protocol):
    """A tree that grows level by level."""

    shape: TreeShape
    pool: list[Node]
    wanted: list[int]
    """The nodes that are looked at next, at first the root; none once the tree is complete."""

    @property
    def max_fed(self) -> int:
        """Most nodes that it wants, besides the root."""

    def grow(self, rows: Sequence[Any]) -> None:
        """Take the rows of the wanted nodes, of the kind for its mode; None for a node without any."""

    def proposal(self) -> Proposal:
        """The tree."""


@dataclass(slots=True, eq=False)
class BestNodes:
    """A tree that grows best-first, level by level, and is at last the best nodes of all that were ranked.

    Each step feeds the best `width` nodes of the newest level that are still among the best `nodes`. Dropping
    the others loses nothing but time: the tree only decides how often the target's tokens are found.
    """

    depth: int
    shape: TreeShape
    pool: list[Node] = field(default_factory=list)
    wanted: list[int] = field(default_factory=lambda: [ROOT])
    """The nodes whose children are to be ranked next; none once the tree is complete."""

    @property
    def max_fed(self) -> int:
        """Most nodes that it wants, besides the root."""
        return self.shape.width * (self.depth - 1)

    def grow(self, rows: Sequence[Sequence[NextToken] | None]) -> None:
        """Add children of the wanted nodes; None for a node that cannot have any."""
        for node, children in zip(self.wanted, rows, strict=True):
            self.add(node, children or ())
        level = 1 + max(map(self.depth_of, self.wanted))
        newest = [node for node in self.best() if self.pool[node].depth == level]
        self.wanted = newest[: self.shape.width] if level < self.depth else []

    def add(self, node: int, children: Sequence[NextToken]) -> None:
        """Add children of a node to the pool. Those beyond the width may not be in the tree."""
        above, depth = (0.0 if node == ROOT else self.pool[node].value), self.depth_of(node) + 1
        self.pool += [
            Node(node, child.token_id, above + child.log_share, depth, rank)
            for rank, child in enumerate(children)
        ]

    def depth_of(self, node: int) -> int:
        """Number of draft tokens up to a node."""
        return 0 if node == ROOT else self.pool[node].depth

    def best(self) -> list[int]:
        """The nodes of the tree, in order of falling value. Among equals the older comes first."""
        eligible = [i for i, node in enumerate(self.pool) if node.rank < self.shape.width]
        return sorted(eligible, key=lambda node: -self.pool[node].value)[: self.shape.nodes]

    def proposal(self) -> Proposal:
        """The tree. Its first n nodes are the best tree of n nodes."""
        return proposal_of(self.pool, self.best())


def proposal_of(pool: Sequence[Node], nodes: Sequence[int]) -> Proposal:
    """Some nodes of a pool in this order, with their parents before them."""
    index = {ROOT: ROOT} | {node: i for i, node in enumerate(nodes)}
    tokens = tuple(pool[node].token_id for node in nodes)
    return Proposal(tokens, tuple(index[pool[node].parent] for node in nodes))


def path_of(pool: Sequence[Node], node: int) -> list[int]:
    """The draft tokens up to a node; none for the root."""
    tokens: list[int] = []
    while node != ROOT:
        tokens.append(pool[node].token_id)
        node = pool[node].parent
    return tokens[::-1]
