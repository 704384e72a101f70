"""Proposals and verdicts of which only the numbers of tokens matter."""

from __future__ import annotations

from functools import cache

from paceline.core.types import Proposal, Verdict


@cache
def chain(num_draft: int) -> Proposal:
    """A chain of so many draft tokens."""
    return Proposal(tuple(range(num_draft)))


@cache
def accepting(num_accepted: int) -> Verdict:
    """A verdict that accepts so many tokens of a chain."""
    return Verdict(num_accepted, tuple(range(num_accepted + 1)), num_accepted)
