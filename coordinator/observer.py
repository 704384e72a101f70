"""What is told of rounds, sequences and requests while they run, and to whom.

The core knows these types only; metrics, traces and log lines are made of them elsewhere. What is told must
cost next to nothing: a round of small models takes a few milliseconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from paceline.core.errors import PacelineError
from paceline.core.types import Timings, TokenOrigin

if TYPE_CHECKING:
    from coordinator.generation import Generation
    from coordinator.ledger import Commit
    from coordinator.running import Running
    from paceline.rpc.codec import GenerateCall

log = logging.getLogger(__name__)


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
    copied: bool = False
    """Its proposal was copied from the sequence's own text."""
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


@dataclass(slots=True)
class RequestRecord:
    """One request from its arrival to its end. Moments are of the coordinator's clock, in seconds."""

    call: GenerateCall
    model: str
    began: float
    operation: str = "text_completion"
    """Its name by OpenTelemetry's conventions (calls.py)."""
    ended: float = 0.0
    request_id: str = ""
    """Empty for one that was refused before it had one."""
    traceparent: str = ""
    """Of its span, for the workers; empty when it is not traced."""
    generation: Generation | None = None
    """None for one that was refused."""
    tenant: str = ""
    """The name of the API key that it came with; empty where there are no keys."""
    error: PacelineError | None = None
    """What ended it before it was whole; CancelledError when its client went away."""


class Observer(Protocol):
    """Told by the dispatcher and the coordinator, on the event loop. What it raises is logged."""

    def request_began(self, request: RequestRecord) -> None:
        """A request came; nothing of it has been checked against the model."""

    def request_ended(self, request: RequestRecord) -> None:
        """It has ended, however."""

    def round_ended(self, running: Running, record: RoundRecord, now: float) -> None:
        """A round was committed, and what follows from it has been sent."""

    def sequence_ended(self, running: Running, now: float) -> None:
        """A sequence has finished, failed or been left by its client."""

    def worker_lost(self, role: str) -> None:
        """A sequence that runs has lost its worker and goes on without it, or with another."""

    def blocks_awaited(self) -> None:
        """A sequence waits for blocks, whether or not it had any."""


def tell_all(observers: Sequence[Observer], tell: Callable[[Observer], None]) -> None:
    """Call it with each. One that fails keeps nothing from the others."""
    for observer in observers:
        try:
            tell(observer)
        except Exception:
            log.exception("an observer failed")
