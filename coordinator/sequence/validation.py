"""Checks a worker's answer against its question. Pure.

A worker may be a former owner, run another version or be broken, so every answer is checked before use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from paceline.core.types import CHAIN, Proposal, TokenOrigin, TreeShape, Verdict, depths_of


def is_sensible(proposal: Proposal, most: int, vocabulary_size: int, shape: TreeShape = CHAIN) -> bool:
    """True for a proposal of at most `most` tokens on a path, within `shape`, all in the vocabulary."""
    if not all(0 <= token_id < vocabulary_size for token_id in proposal.token_ids):
        return False
    if not proposal.parents:
        return not proposal.tries and proposal.num_draft_tokens <= most
    num_tries = max(len(proposal.tries), proposal.num_draft_tokens)
    widest = max(Counter(proposal.parents).values())
    within = widest <= shape.width and num_tries <= shape.nodes
    return not shape.is_chain and within and proposal.depth <= most


def shortened(
    proposal: Proposal, most: int, vocabulary_size: int, known: Proposal, shape: TreeShape = CHAIN
) -> Proposal | None:
    """A continuation, cut to `most` tokens on a path and to `shape`; None if it is not useful.

    It is useful only if it extends `known`, the continuation sent earlier for the same outcome: the target
    may have begun with it, so a different continuation comes too late.
    """
    if proposal.distributions or most <= 0:
        return None
    cut = proposal.first(_count_within(proposal, most, shape))
    before = known.num_draft_tokens
    longer = cut.num_draft_tokens > before and cut.first(before) == known
    return cut if longer and is_sensible(cut, most, vocabulary_size, shape) else None


def _count_within(proposal: Proposal, most: int, shape: TreeShape) -> int:
    """Number of nodes before the first one that is too deep or too many."""
    if not proposal.parents:
        return most
    deeper = (node for node, depth in enumerate(depths_of(proposal.parents)) if depth > most)
    return min(next(deeper, proposal.num_draft_tokens), shape.nodes)


def verdict_fits(verdict: Verdict, proposal: Proposal, base_length: int, vocabulary_size: int) -> bool:
    """True for a verdict on this proposal after a ledger of `base_length` tokens."""
    accepted = verdict.num_accepted
    return (
        _accepts_path(verdict, proposal)
        and 0 <= verdict.token_ids[-1] < vocabulary_size
        and verdict.num_computed_tokens == base_length + accepted
        and all(token_id < vocabulary_size for token_id in verdict.forced_token_ids)
    )


def _accepts_path(verdict: Verdict, proposal: Proposal) -> bool:
    """True if the accepted tokens are those of a path from the proposal's root."""
    nodes, outcome = verdict.accepted_nodes, verdict.outcome
    if max(nodes, default=-1) >= proposal.num_draft_tokens:
        return False
    path = proposal.path_to(outcome.last_node) if proposal.parents else ()
    return nodes == path and verdict.token_ids[:-1] == proposal.accepted(outcome)


def with_origins(verdict: Verdict, proposal: Proposal) -> Sequence[tuple[int, TokenOrigin]]:
    """The verdict's tokens, each with its origin."""
    last = verdict.token_ids[-1]
    behind = _behind_accepted(verdict, proposal)
    if not proposal.token_ids:
        origin = TokenOrigin.TARGET
    elif not behind:
        origin = TokenOrigin.BONUS
    elif last in behind:
        # It was accepted, and its grammar ended after it, so it had no next row.
        origin = TokenOrigin.ACCEPTED
    else:
        origin = TokenOrigin.CORRECTION
    origins = [*([TokenOrigin.ACCEPTED] * verdict.num_accepted), origin]
    return list(zip(verdict.token_ids, origins, strict=True))


def _behind_accepted(verdict: Verdict, proposal: Proposal) -> Sequence[int]:
    """The draft tokens that may follow the last accepted one."""
    if not proposal.parents:
        return proposal.token_ids[verdict.num_accepted :][:1]
    return [proposal.token_ids[child] for child in proposal.children_of(verdict.outcome.last_node)]
