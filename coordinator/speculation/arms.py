"""What a round can do: decode plainly, or draft a chain or a tree. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

AUTO_WIDTH = 4
"""Most children of a node where the width is chosen here: a tree's best nodes hardly have more."""
SIZES = (8, 16, 32)
"""Nodes of trees, besides the most that the server allows."""


class DraftArm(NamedTuple):
    """Bounds of a round's proposal."""

    depth: int = 0
    """K; 0 for a plain round."""
    nodes: int = 0
    """Most nodes of a tree; 0 for a chain."""

    @property
    def more(self) -> int:
        """Nodes of a tree beyond those of a chain as deep."""
        return max(self.nodes - self.depth, 0)

    @property
    def rows(self) -> int:
        """Most draft tokens."""
        return self.nodes or self.depth


PLAIN: Final = DraftArm()


@dataclass(slots=True)
class DraftArms:
    """All arms of a controller, by number: the plain round is 0, the chain of K is K, then come the trees.

    Trees are sorted by size. Of each size, one is half as deep as the greatest K and one as deep as that.
    """

    max_draft: int
    max_nodes: int = 0
    """Most nodes of a tree; 0 for chains alone."""
    each: list[DraftArm] = field(init=False)
    chains: range = field(init=False)
    trees: range = field(init=False)

    def __post_init__(self) -> None:
        self.each = [DraftArm(k) for k in range(self.max_draft + 1)]
        self.chains = range(1, len(self.each))
        if self.max_draft and self.max_nodes:
            sizes = {min(nodes, self.max_nodes) for nodes in (*SIZES, self.max_nodes)}
            depths = {(self.max_draft + 1) // 2, self.max_draft}
            trees = {(nodes, min(depth, nodes)) for nodes in sizes for depth in depths}
            self.each += [DraftArm(depth, nodes) for nodes, depth in sorted(trees)]
        self.trees = range(self.max_draft + 1, len(self.each))

    def nearest(self, arm: DraftArm) -> int:
        """The arm itself or, if it is none of these, the next larger one of its kind; else the largest."""
        if not (arm.nodes and self.trees):
            return min(arm.depth, self.max_draft)
        for number in self.trees:
            depth, nodes = self.each[number]
            if depth >= arm.depth and nodes >= arm.nodes:
                return number
        return self.trees[-1]
