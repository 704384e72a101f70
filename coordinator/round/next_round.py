"""The part of the next round that is decided while the present round is being verified. Pure.

For some outcomes of the present round, the target may be offered the next round's proposal. It may also be
told that a plain round follows every other outcome. In both cases it begins the next round by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.proposers.interface import Guess
from coordinator.round.present_round import NOTHING
from paceline.core.types import Outcome, Proposal, Verdict


@dataclass(slots=True)
class NextRound:
    """The next round's K and the offers made to the target."""

    num_wanted: int | None = None
    """K; None until it is chosen."""
    plain_otherwise: bool = False
    """The target was told that a plain round follows each outcome without an offer."""
    guess: Guess | None = None
    """The context source's guess that was offered, if any."""
    offers: dict[Outcome, Proposal] = field(default_factory=dict)
    """The longest proposal that was offered for each outcome."""
    _first_offers: dict[Outcome, int] = field(default_factory=dict)
    """Draft tokens (nodes) of the proposal that was offered first for each outcome."""

    def offer(self, proposals: Mapping[Outcome, Proposal]) -> None:
        """Record proposals that are sent to the target."""
        self.offers.update(proposals)
        for outcome, proposal in proposals.items():
            self._first_offers.setdefault(outcome, proposal.num_draft_tokens)

    def offered(self, outcome: Outcome) -> Proposal:
        """The longest proposal offered for an outcome; an empty one if none was offered."""
        return self.offers.get(outcome, NOTHING)

    def follows(self, verdict: Verdict) -> Proposal | None:
        """The proposal that the target judges next by itself; None if the target waits for a command.

        If the verdict does not say that the next round has begun, an offer for this outcome may still be on
        its way. The target begins with the first offer that arrives, which may be shorter than a later one.
        """
        count = verdict.went_on_with
        if count is None:
            count = self._first_offers.get(verdict.outcome, 0 if self.plain_otherwise else None)
        return None if count is None else self.offered(verdict.outcome).first(count)

    def permits(self, verdict: Verdict) -> bool:
        """False if the target claims to have begun a round that it was not offered."""
        if not verdict.went_on_with:
            return verdict.went_on_with is None or self.plain_otherwise
        return verdict.went_on_with <= self.offered(verdict.outcome).num_draft_tokens
