"""Which of its siblings each draft token of a path is. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.types import Proposal


def ranks(proposal: Proposal, token_ids: Sequence[int]) -> tuple[int, ...]:
    """The place among its siblings, from 0, of each node on the path of these tokens from the root.

    The nodes of a chain have no siblings. The path must be one of the proposal's.
    """
    if not proposal.parents:
        return (0,) * len(token_ids)
    node: int | None = None
    found: list[int] = []
    for token_id in token_ids:
        siblings = proposal.children_of(node)
        rank = [proposal.token_ids[sibling] for sibling in siblings].index(token_id)
        node = siblings[rank]
        found.append(rank)
    return tuple(found)
