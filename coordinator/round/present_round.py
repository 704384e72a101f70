"""The present round of a sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.proposers.interface import Guess
from coordinator.sequence.round_record import RoundRecord
from paceline.core.types import CHAIN, Proposal, TreeShape

NOTHING = Proposal()
"""The proposal of a plain round."""


@dataclass(slots=True)
class PresentRound:
    """Number, K, shape, proposal and record of the round in progress."""

    number: int = 0
    """0 before the first round."""
    num_wanted: int = 0
    """K: number of draft tokens requested if the draft is asked; the depth of a tree."""
    shape: TreeShape = CHAIN
    """Bounds of the tree requested."""
    num_unread: int = 0
    """Number of ledger tokens that the draft had not read when it was asked."""
    proposal: Proposal = NOTHING
    guess: Guess | None = None
    """The guess behind the proposal, if a context source made it."""
    prefills: bool = False
    """True if the target computes the sequence from its beginning."""
    record: RoundRecord = field(default_factory=RoundRecord)

    @property
    def drafted(self) -> bool:
        """True if the draft worker made the proposal."""
        return self.proposal.num_draft_tokens > 0 and self.guess is None

    def propose(self, guess: Guess) -> None:
        """Use a context source's guess as the proposal."""
        self.guess, self.proposal, self.record.source = guess, guess.proposal, guess.source

    def drop_proposal(self) -> None:
        """Make this a round without draft tokens."""
        self.guess, self.proposal = None, NOTHING
        self.record.hit, self.record.source = False, ""
