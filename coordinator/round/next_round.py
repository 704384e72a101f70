"""What is already decided about the next round while the present one is being verified. Pure.

The target may be offered the next round's proposal for some outcomes of the present one, or told that every
other outcome is followed by a plain round. It then begins the next round by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.proposers.interface import Guess
from coordinator.round.present_round import NOTHING
from paceline.core.types import Outcome, Proposal, Verdict


@dataclass(slots=True)
class NextRound:
    """The next round's K, and what the target was offered of it."""

    num_wanted: int | None = None
    """K, once it was needed."""
    plain_otherwise: bool = False
    """The target was told that an outcome without an offer is followed by a plain round."""
    guess: Guess | None = None
    """The context source's guess that was offered, if any."""
    offers: dict[Outcome, Proposal] = field(default_factory=dict)
    """The longest proposal that was offered for each outcome."""
    _first_offers: dict[Outcome, int] = field(default_factory=dict)
    """Draft tokens of the proposal that was offered first for each outcome."""

    def offer(self, proposals: Mapping[Outcome, Proposal]) -> None:
        """Record proposals that the target is sent."""
        self.offers.update(proposals)
        for outcome, proposal in proposals.items():
            self._first_offers.setdefault(outcome, proposal.num_draft_tokens)

    def offered(self, outcome: Outcome) -> Proposal:
        """The longest proposal for an outcome; an empty one where none was offered."""
        return self.offers.get(outcome, NOTHING)

    def follows(self, verdict: Verdict) -> Proposal | None:
        """The proposal that the target judges next without being asked; None if the target waits.

        If the verdict does not say what the target went on with, the offer for this outcome reaches the
        target later. The target begins with the first offer, which may be the shorter one of two.
        """
        count = verdict.went_on_with
        if count is None:
            count = self._first_offers.get(verdict.outcome, 0 if self.plain_otherwise else None)
        return None if count is None else Proposal(self.offered(verdict.outcome).token_ids[:count])

    def permits(self, verdict: Verdict) -> bool:
        """False if the target claims to have begun a round that it was not offered."""
        if not verdict.went_on_with:
            return verdict.went_on_with is None or self.plain_otherwise
        return verdict.went_on_with <= self.offered(verdict.outcome).num_draft_tokens
