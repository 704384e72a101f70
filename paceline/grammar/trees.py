"""The masks after the nodes of a draft tree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.core import limits
from paceline.core.errors import PacelineError
from paceline.grammar.state import GrammarState, Mask


def tree_masks(
    state: GrammarState,
    generated: Sequence[int],
    drafts: Sequence[int],
    parents: Sequence[int],
    seconds: float = limits.MAX_STRUCTURE_SECONDS,
) -> tuple[Mask, list[int]]:
    """The allowed tokens after the generated tokens, and after the path to each node.

    Args:
        state: the sequence's.
        generated: the ledger's tokens after the prompt.
        drafts: N nodes, not necessarily allowed.
        parents: of each node, an earlier one, or -1.
        seconds: processor time after which only the first row is still computed.

    Returns:
        bool [N + 1, V], where rows that no text can reach allow everything, as in `GrammarState.masks`; and
        the nodes behind which the grammar was not followed, because it gave up there or took too long.
        Whether there is a mask after a node does not depend on what is drawn after it.

    Raises as `GrammarState.masks` does for the first row.
    """
    begun = state.clock()
    rows = np.ones((len(drafts) + 1, state.vocabulary_size), dtype=np.bool_)
    rows[0] = state.masks(generated)[0]
    children: list[list[int]] = [[] for _ in rows]
    for node, parent in enumerate(parents):
        children[parent + 1].append(node)
    unfollowed: list[int] = []
    # Depth first: going on costs less than going back. The path is that to the parent.
    waiting: list[tuple[int, tuple[int, ...]]] = [(node, ()) for node in reversed(children[0])]
    while waiting:
        node, path = waiting.pop()
        token = drafts[node]
        if not rows[parents[node] + 1, token] or token in state.ends:
            continue  # no text goes on here
        path = (*path, token)
        in_time = state.clock() - begun < seconds
        mask = _mask_after(state, [*generated, *path]) if in_time else None
        if mask is None:
            unfollowed.append(node)
            continue
        rows[node + 1] = mask
        waiting += [(child, path) for child in reversed(children[node + 1])]
    return rows, unfollowed


def _mask_after(state: GrammarState, tokens: Sequence[int]) -> Mask | None:
    """The tokens allowed there; None where the grammar gives up. That is reported when it is asked again, as
    the first row of a round."""
    try:
        allowed: Mask = state.masks(tokens)[0]
    except PacelineError:
        return None
    return allowed
