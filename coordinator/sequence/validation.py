"""Checks a worker's answer against its question. Pure.

A worker may be a former owner, run another version or be broken, so every answer is checked before use.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.types import Proposal, TokenOrigin, Verdict


def is_sensible(proposal: Proposal, most: int, vocabulary_size: int) -> bool:
    """True for a chain of at most `most` tokens, all in the vocabulary."""
    return (
        not proposal.parents
        and proposal.num_draft_tokens <= most
        and all(0 <= token_id < vocabulary_size for token_id in proposal.token_ids)
    )


def shortened(proposal: Proposal, most: int, vocabulary_size: int, known: Proposal) -> Proposal | None:
    """The first `most` tokens of a continuation; None if they are not useful.

    They are useful only if they extend `known`, the continuation sent earlier for the same outcome: the
    target may have begun with it, so a different continuation comes too late.
    """
    before = known.token_ids
    if proposal.distributions or proposal.parents or most <= len(before):
        return None
    cut = Proposal(proposal.token_ids[:most])
    longer = cut.num_draft_tokens > len(before) and cut.token_ids[: len(before)] == before
    return cut if longer and is_sensible(cut, most, vocabulary_size) else None


def verdict_fits(verdict: Verdict, proposal: Proposal, base_length: int, vocabulary_size: int) -> bool:
    """True for a verdict on this proposal after a ledger of `base_length` tokens."""
    accepted = verdict.num_accepted
    return (
        accepted <= proposal.num_draft_tokens
        and verdict.token_ids[:accepted] == proposal.token_ids[:accepted]
        and 0 <= verdict.token_ids[-1] < vocabulary_size
        and verdict.num_computed_tokens == base_length + accepted
        and all(token_id < vocabulary_size for token_id in verdict.forced_token_ids)
    )


def with_origins(verdict: Verdict, proposal: Proposal) -> Sequence[tuple[int, TokenOrigin]]:
    """The verdict's tokens, each with its origin."""
    if proposal.num_draft_tokens == 0:
        last = TokenOrigin.TARGET
    elif verdict.num_accepted == proposal.num_draft_tokens:
        last = TokenOrigin.BONUS
    else:
        last = TokenOrigin.CORRECTION
        # Equal to the rejected token: it was accepted, and its grammar ended after it, so it had no next row.
        if verdict.token_ids[-1] == proposal.token_ids[verdict.num_accepted]:
            last = TokenOrigin.ACCEPTED
    origins = [*([TokenOrigin.ACCEPTED] * verdict.num_accepted), last]
    return list(zip(verdict.token_ids, origins, strict=True))
