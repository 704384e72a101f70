"""Proposals and verdicts of which only the shapes matter."""

from __future__ import annotations

import heapq
from functools import cache

from coordinator.sequence.ledger import Commit
from coordinator.sequence.round_record import RoundRecord
from paceline.core.types import Proposal, Timings, TokenOrigin, TreeShape, Verdict


@cache
def chain(num_draft: int) -> Proposal:
    """A chain of so many draft tokens."""
    return Proposal(tuple(range(num_draft)))


@cache
def accepting(num_accepted: int) -> Verdict:
    """A verdict that accepts so many tokens of a chain."""
    return Verdict(num_accepted, tuple(range(num_accepted + 1)), num_accepted)


def judged_chain(num_draft: int, num_accepted: int) -> RoundRecord:
    """The record of a round whose verdict was committed whole."""
    last = TokenOrigin.CORRECTION if num_accepted < num_draft else TokenOrigin.BONUS
    origins = (*[TokenOrigin.ACCEPTED] * num_accepted, last)
    commit = Commit(0, accepting(num_accepted).token_ids, origins, "")
    return RoundRecord().judged(0.0, 0.0, chain(num_draft), Timings(), commit)


@cache
def tree(rate: float, ranks: tuple[float, ...], depth: int, shape: TreeShape) -> Proposal:
    """The best tree within these bounds, if a first child is right at this rate, and otherwise the second,
    third, … with the shares of `ranks`."""
    shares = [rate, *((1 - rate) * share for share in ranks)][: shape.width]
    found = [(-share, -1, 1) for share in shares]
    parents: list[int] = []
    while found and len(parents) < shape.nodes:
        reach, parent, level = heapq.heappop(found)
        if level < depth:
            for share in shares:
                heapq.heappush(found, (reach * share, len(parents), level + 1))
        parents.append(parent)
    return Proposal(tuple(range(len(parents))), tuple(parents))


@cache
def children(proposal: Proposal) -> dict[int, list[int]]:
    """The children of each node of a tree that has any, the best first; those of the root by -1."""
    result: dict[int, list[int]] = {}
    for node, parent in enumerate(proposal.parents):
        result.setdefault(parent, []).append(node)
    return result


@cache
def following(path: tuple[int, ...]) -> Verdict:
    """A verdict that accepts these nodes of a tree."""
    return Verdict(len(path), tuple(range(len(path) + 1)), len(path), accepted_nodes=path)
