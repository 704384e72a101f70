"""The record of one round, for statistics, metrics and traces. Pure.

Recording must be cheap: a round of small models takes a few milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from coordinator.sequence.ledger import Commit
from coordinator.sequence.ranks import ranks
from paceline.core.types import Proposal, Timings, TokenOrigin

DRAFT: Final = "draft"
"""Source name of a draft worker."""
PROMPT_LOOKUP: Final = "prompt-lookup"
"""Source name of prompt lookup, in the public counts."""


@dataclass(slots=True)
class RoundRecord:
    """One round of one sequence. Times are seconds of the coordinator's clock."""

    number: int = 0
    began: float = 0.0
    ended: float = 0.0
    """Time of its verdict."""
    target_since: float | None = None
    """Earliest time at which the target can have begun the round by itself; None if it was sent."""
    left_target: float = 0.0
    """Latest known time before the verdict left the target."""
    hit: bool = False
    """True if the proposal was there when the previous verdict came."""
    source: str = ""
    """Name of the context source of the proposal; empty for a draft worker's, and without a proposal."""
    prefills: bool = False
    """True if the target opened the sequence in this round."""
    num_draft: int = 0
    """Number of verified draft tokens: the nodes of a tree."""
    depth: int = 0
    """Number of draft tokens on its longest path: K of a chain."""
    num_accepted: int = 0
    """Number of committed draft tokens; tokens after the sequence's end do not count."""
    num_judged: int = 0
    """Number of committed tokens for which there was a draft token: accepted ones and corrections."""
    accepted_ranks: tuple[int, ...] = ()
    """Place among its siblings of each committed draft token; 0 in a chain."""
    num_tokens: int = 0
    """Number of committed tokens: the accepted ones, plus one unless an accepted token ended the round."""
    draft: Timings | None = None
    """None if the round did not wait for a proposal."""
    draft_waited: float = 0.0
    verify: Timings = field(default_factory=Timings)
    verify_waited: float = 0.0

    @property
    def proposed_by(self) -> str:
        """Name of the source of its draft tokens. Requires at least one draft token."""
        return self.source or DRAFT

    def drafted(self, waited: float, timings: Timings) -> None:
        """Record that the proposal came."""
        self.draft, self.draft_waited = timings, waited

    def judged(
        self, now: float, waited: float, proposal: Proposal, timings: Timings, commit: Commit
    ) -> RoundRecord:
        """Record that the verdict was committed, possibly clipped. Returns the completed record."""
        self.ended, self.verify, self.verify_waited = now, timings, waited
        since = now - waited if self.target_since is None else self.target_since
        self.left_target = since + timings.queue + timings.compute
        self.num_draft, self.depth = proposal.num_draft_tokens, proposal.depth
        accepted = self.num_accepted = commit.origins.count(TokenOrigin.ACCEPTED)
        self.num_judged = accepted + commit.origins.count(TokenOrigin.CORRECTION)
        self.accepted_ranks = ranks(proposal, commit.token_ids[:accepted])
        self.num_tokens = len(commit.token_ids)
        return self
