"""What is recorded of one round, for statistics, metrics and traces. Pure.

Recording must cost next to nothing: a round of small models takes a few milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from coordinator.sequence.ledger import Commit
from paceline.core.types import Timings, TokenOrigin

DRAFT: Final = "draft"
"""Name of the source of proposals that is a draft worker."""
PROMPT_LOOKUP: Final = "prompt-lookup"
"""Name of the context source that the public counts name."""


@dataclass(slots=True)
class RoundRecord:
    """One round of one sequence. Moments are of the coordinator's clock, in seconds."""

    number: int = 0
    began: float = 0.0
    ended: float = 0.0
    """When its verdict came."""
    target_since: float | None = None
    """Where the target began it by itself: a moment before that, for all that is known here."""
    left_target: float = 0.0
    """A moment before its verdict left the target."""
    hit: bool = False
    """Its proposal was there when the verdict before it came."""
    source: str = ""
    """Name of the context source of its proposal; empty for the draft's, and without one."""
    prefills: bool = False
    """The target opened the sequence in it."""
    num_draft: int = 0
    """Draft tokens that were verified."""
    num_accepted: int = 0
    """Those of them that were committed: none behind the sequence's end."""
    num_tokens: int = 0
    """Tokens that were committed: the accepted ones, and one more unless an accepted one ended the round."""
    draft: Timings | None = None
    """None without a proposal that was waited for."""
    draft_waited: float = 0.0
    verify: Timings = field(default_factory=Timings)
    verify_waited: float = 0.0

    @property
    def proposed_by(self) -> str:
        """Name of the source of its draft tokens; it has some."""
        return self.source or DRAFT

    def drafted(self, waited: float, timings: Timings) -> None:
        """Its proposal came."""
        self.draft, self.draft_waited = timings, waited

    def judged(
        self, now: float, waited: float, num_draft: int, timings: Timings, commit: Commit
    ) -> RoundRecord:
        """Its verdict was committed, maybe not whole: this record, which is complete with that."""
        self.ended, self.verify, self.verify_waited = now, timings, waited
        since = now - waited if self.target_since is None else self.target_since
        self.left_target = since + timings.queue + timings.compute
        self.num_draft, self.num_tokens = num_draft, len(commit.token_ids)
        self.num_accepted = commit.origins.count(TokenOrigin.ACCEPTED)
        return self
