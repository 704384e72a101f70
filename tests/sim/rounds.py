"""Proposals and verdicts of which only the numbers of tokens matter."""

from __future__ import annotations

from functools import cache

from coordinator.sequence.ledger import Commit
from coordinator.sequence.round_record import RoundRecord
from paceline.core.types import Proposal, Timings, TokenOrigin, Verdict


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
