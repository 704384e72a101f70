"""Merges the proposals of several drafts for one round into one prefix tree (SpecInfer, 2024). Pure.

Where the target judges by q, every draw of every draft stays a try of its own, with the q that it was drawn
from and in the order of the drafts: two drafts that drew one token after one node share its row, not its
test. Dropping, sorting or merging tries would bias the output (decision 84).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest

from paceline.core.types import Proposal, SparseDistribution


class _PrefixTree:
    """Nodes by their parent and token, in the order in which they were first added."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self._nodes: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token_id: int) -> int:
        """The child of a node that has this token."""
        node = self._nodes.setdefault((parent, token_id), len(self.token_ids))
        if node == len(self.token_ids):
            self.token_ids.append(token_id)
            self.parents.append(parent)
        return node

    @property
    def shape(self) -> tuple[int, ...]:
        """The parents; none if the tree is a chain."""
        is_chain = all(parent == node - 1 for node, parent in enumerate(self.parents))
        return () if is_chain else tuple(self.parents)


def merged(proposals: Sequence[Proposal]) -> Proposal:
    """One proposal of them all; a single one as it is, without any an empty one.

    Without distributions every token is the target's own choice or a point mass, and equal children count
    once. Nodes are then taken from the drafts in turn, so that the first n are good ones for every n, if
    they are so in each proposal.
    """
    some = [proposal for proposal in proposals if proposal.token_ids]
    if len(some) < 2:
        return some[0] if some else Proposal()
    return _with_all_tries(some) if any(each.distributions for each in some) else _in_turn(some)


def _with_all_tries(proposals: Sequence[Proposal]) -> Proposal:
    tree, tries = _PrefixTree(), list[int]()
    for proposal in proposals:
        nodes: list[int] = []
        for token_id, parent in zip(proposal.token_ids, _parents(proposal), strict=True):
            nodes.append(tree.add(parent if parent < 0 else nodes[parent], token_id))
        tries.extend(nodes[node] for node in _tries(proposal))
    distributions = chain.from_iterable(map(_distributions, proposals))
    return Proposal(tuple(tree.token_ids), tuple(tree.parents), tuple(distributions), tuple(tries))


def _in_turn(proposals: Sequence[Proposal]) -> Proposal:
    tree = _PrefixTree()
    nodes: list[list[int]] = [[] for _ in proposals]
    listed = [zip(each.token_ids, _parents(each), strict=True) for each in proposals]
    for turn in zip_longest(*listed):
        for mine, node in zip(nodes, turn, strict=True):
            if node is not None:
                token_id, parent = node
                mine.append(tree.add(parent if parent < 0 else mine[parent], token_id))
    return Proposal(tuple(tree.token_ids), tree.shape)


def _parents(proposal: Proposal) -> Sequence[int]:
    return proposal.parents or range(-1, proposal.num_draft_tokens - 1)


def _tries(proposal: Proposal) -> Sequence[int]:
    return proposal.tries or range(proposal.num_draft_tokens)


def _distributions(proposal: Proposal) -> Sequence[SparseDistribution]:
    """Of each try; a point mass for a token that was not drawn."""
    return proposal.distributions or [
        SparseDistribution.point(proposal.token_ids[node]) for node in _tries(proposal)
    ]
