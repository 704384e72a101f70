"""Whether a worker's answer fits what it was asked. Pure.

A worker may be a former owner, another version or broken: nothing of it is believed before it is checked.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.types import Proposal, TokenOrigin, Verdict


def is_sensible(proposal: Proposal, most: int, vocabulary_size: int) -> bool:
    """True for a chain of at most `most` tokens of the vocabulary."""
    return (
        not proposal.parents
        and proposal.num_draft_tokens <= most
        and all(0 <= token_id < vocabulary_size for token_id in proposal.token_ids)
    )


def shortened(proposal: Proposal, most: int, vocabulary_size: int, known: Proposal) -> Proposal | None:
    """The first `most` tokens of a continuation; None where they are of no use.

    So they are unless they begin with all that is `known` for the same outcome, and go on: the target may
    have begun with that, and what says something else now comes too late.
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
    )


def with_origins(verdict: Verdict, proposal: Proposal) -> Sequence[tuple[int, TokenOrigin]]:
    """The verdict's tokens, each with how it came about."""
    if proposal.num_draft_tokens == 0:
        last = TokenOrigin.TARGET
    elif verdict.num_accepted == proposal.num_draft_tokens:
        last = TokenOrigin.BONUS
    else:
        last = TokenOrigin.CORRECTION
        # Of a rejected token no other row is the same: it was accepted, and its grammar ends behind it.
        if verdict.token_ids[-1] == proposal.token_ids[verdict.num_accepted]:
            last = TokenOrigin.ACCEPTED
    origins = [*([TokenOrigin.ACCEPTED] * verdict.num_accepted), last]
    return list(zip(verdict.token_ids, origins, strict=True))
