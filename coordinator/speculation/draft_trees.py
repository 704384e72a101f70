"""What draft trees bring beside chains, learned from verdicts. Pure.

Where the nodes of a tree are in the order of their value, its first n nodes are the best tree of n nodes, and
those of them that are not too deep the best shallower one. So each verdict says what every smaller tree would
have brought. In modes that judge by q, nodes are in the order in which they were drawn; a smaller tree is
then about, but not exactly, what a draft with smaller bounds draws.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

from coordinator.speculation.arms import DraftArm, DraftArms
from coordinator.speculation.expected_tokens import Acceptance, expected_tokens
from paceline.core.types import depths_of

TREE_MEMORY = 500.0
"""Number of verdicts that the gain of a tree remembers."""
RANKS = (0.4, 0.17, 0.07)
"""Where the first child of a node is wrong, the share of the second, third, … that are right, as the model
assumes. Further children are as good as the last."""
MODEL_TOKENS = 40.0
"""Weight of the model in tokens."""
STEPS = 20
"""Rates of first children for which the model is evaluated."""


def tree_tokens(rate: float, width: int, bounds: DraftArm) -> float:
    """Expected tokens of the best tree within these bounds, if a first child is right at this rate."""
    shares = [rate, *((1 - rate) * RANKS[min(rank, len(RANKS) - 1)] for rank in range(width - 1))]
    expected, paths = 1.0, [(-share, 1) for share in shares]
    heapq.heapify(paths)
    for _ in range(bounds.nodes):
        if not paths:
            break
        reach, depth = heapq.heappop(paths)
        expected -= reach
        if depth < bounds.depth:
            for share in shares:
                heapq.heappush(paths, (reach * share, depth + 1))
    return expected


@cache
def _gain(step: int, width: int, bounds: DraftArm) -> float:
    """Of the best tree over a chain as deep, at a rate of `step` / `STEPS`."""
    rate = step / STEPS
    return tree_tokens(rate, width, bounds) / expected_tokens([rate] * bounds.depth)[-1]


@dataclass(slots=True)
class TreeGains:
    """Tokens of each tree, as a multiple of those that a model expects.

    A chain's tokens are known from all rounds, a tree's only from rounds with trees. The model makes of the
    chain's what the best tree would bring if acceptance depended on the rank alone. How far it is off hardly
    depends on the text, so it also holds later.
    """

    arms: DraftArms
    width: int
    made: list[float] = field(init=False)
    modelled: list[float] = field(init=False)
    """By tree: tokens of the rounds that were judged, and tokens that the model expected there."""

    def __post_init__(self) -> None:
        self.made, self.modelled = ([MODEL_TOKENS] * len(self._trees) for _ in range(2))

    def observe(
        self, asked: DraftArm, parents: Sequence[int], path: Sequence[int], chain: Sequence[float]
    ) -> None:
        """Learn from a verdict on the tree of these `parents` that accepted the nodes of `path`.

        `asked` has the bounds that it was drafted within, and `chain` the tokens that were expected of a
        chain with 0, 1, … draft tokens.
        """
        depths = depths_of(parents)
        keep = 1 - 1 / TREE_MEMORY
        for i, (arm, modelled) in enumerate(zip(self._trees, self._model(chain), strict=True)):
            if arm.depth > asked.depth or arm.nodes > asked.nodes:
                continue
            nodes = [node for node, depth in enumerate(depths) if depth <= arm.depth][: arm.nodes]
            if len(nodes) < arm.nodes and arm != asked:
                # It would have had others beside these.
                continue
            self.made[i] = self.made[i] * keep + 1 + len(set(nodes).intersection(path))
            self.modelled[i] = self.modelled[i] * keep + modelled

    def expected(self, chain: Sequence[float]) -> list[float]:
        """Expected tokens of each tree, from those of chains with 0, 1, … draft tokens."""
        every = zip(self._trees, self._model(chain), self.made, self.modelled, strict=True)
        return [min(now * made / modelled, arm.depth + 1.0) for arm, now, made, modelled in every]

    def _model(self, chain: Sequence[float]) -> list[float]:
        step = round((chain[1] - 1) * STEPS)
        return [chain[arm.depth] * _gain(step, self.width, arm) for arm in self._trees]

    @property
    def _trees(self) -> list[DraftArm]:
        return self.arms.each[self.arms.trees.start :]


def chain_verdicts(parents: Sequence[int], path: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The verdicts (K, accepted) of chains of first children, had they decoded what a tree's path has.

    Whatever lies below the last node of a path that has no children was not judged.
    """
    first: dict[int, int] = {}
    for node, parent in enumerate(parents):
        first.setdefault(parent, node)
    accepted = 0
    for parent, node in pairwise((-1, *path)):
        if first[parent] == node:
            accepted += 1
        else:
            yield accepted + 1, accepted
            accepted = 0
    if (path[-1] if path else -1) in first:
        yield accepted + 1, accepted
    elif accepted:
        yield accepted, accepted


@dataclass(slots=True)
class DraftWorth:
    """What the drafts of one sequence bring, by arm."""

    arms: DraftArms
    chain: Acceptance
    gains: TreeGains | None = None
    """None for a sequence that drafts chains only."""
    draws_chains: bool = True
    """False for a sequence that drafts trees only."""

    def expected(self) -> list[float]:
        """Expected tokens of a round by arm; 0 for an arm that the sequence does not use."""
        chain = self.chain.expected(self.arms.max_draft)
        trees = self.gains.expected(chain) if self.gains is not None else [0.0] * len(self.arms.trees)
        if not self.draws_chains:
            chain = [chain[0], *[0.0] * len(self.arms.chains)]
        return chain + trees

    def observe(self, asked: DraftArm, parents: Sequence[int], path: Sequence[int]) -> None:
        """Learn from a verdict on a tree, or on a chain where a tree was asked."""
        if self.gains is not None:
            self.gains.observe(asked, parents, path, self.chain.expected(self.arms.max_draft))
        for judged, accepted in chain_verdicts(parents, path):
            self.chain.observe(judged, accepted)
