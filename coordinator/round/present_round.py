"""The round that a sequence is in."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.proposers.interface import Guess
from coordinator.sequence.round_record import RoundRecord
from paceline.core.types import Proposal

NOTHING = Proposal()
"""The proposal of a plain round."""


@dataclass(slots=True)
class PresentRound:
    """What is asked for in it, what is proposed, and what is recorded of it."""

    number: int = 0
    """0 before the first round."""
    num_wanted: int = 0
    """Draft tokens that the draft is, or would be, asked for."""
    num_unread: int = 0
    """Ledger tokens that the draft had not read when it was asked."""
    proposal: Proposal = NOTHING
    guess: Guess | None = None
    """What the proposal is, if it is a context source's."""
    prefills: bool = False
    """The target computes the sequence from its beginning."""
    record: RoundRecord = field(default_factory=RoundRecord)

    @property
    def drafted(self) -> bool:
        """The proposal is the draft's."""
        return self.proposal.num_draft_tokens > 0 and self.guess is None

    def propose(self, guess: Guess) -> None:
        """The proposal is a context source's guess."""
        self.guess, self.proposal, self.record.source = guess, guess.proposal, guess.source

    def drop_proposal(self) -> None:
        """The round goes on without draft tokens."""
        self.guess, self.proposal = None, NOTHING
        self.record.hit, self.record.source = False, ""
