"""One sequence in the dispatcher: its machine, its workers, and the parts its client has not read."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from coordinator.round.machine import RoundMachine
from coordinator.round.state import RoundState
from coordinator.sequence.ledger import Commit
from coordinator.sequence.messages import Phase
from coordinator.sequence.replay_buffer import ReplayBuffer
from coordinator.sequence.round_record import RoundRecord
from coordinator.workers.links import Link
from paceline.core.errors import PacelineError

Parts = asyncio.Queue[Commit | PacelineError]
"""Parts that the client has not read yet, in order."""

UNREAD = "the client does not read; the request may be resumed"
"""Message of the error for a client that does not read its stream."""


@dataclass(slots=True, eq=False)
class Running:
    """One sequence with its workers and its client."""

    machine: RoundMachine
    target: Link | None = None
    drafts: list[Link | None] = field(init=False)
    """The worker at each place among the sequence's drafts."""
    admitted: bool = False
    order: int = 0
    """Order of arrival: the oldest sequence has the smallest number."""
    was_blocked: bool = False
    alone_since: float | None = None
    """Since when the sequence lacks blocks although no other sequence holds any."""
    ask_at: float | None = None
    """When to ask for blocks again; None if the worker did not say."""
    tenant: str = ""
    """The name of the API key that its request came with; empty where there are no keys."""
    error: PacelineError | None = None
    """The error that ended the sequence."""
    arrived_at: float = 0.0
    """When the request arrived."""
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    received: int = field(init=False)
    """Tokens that its client had before this coordinator generated any."""
    replay: ReplayBuffer | None = None
    """Everything emitted, kept if the client may resume."""
    unread: int = 0
    behind_since: float | None = None
    """Since when the sequence is paused because its client does not read."""
    read: bool = True
    """False while the client's connection is lost: the request is then held for a limited time."""
    parts: Parts = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.received = self.state.ledger.num_generated
        self.drafts = [None] * len(self.state.drafts.views)

    @property
    def state(self) -> RoundState:
        """Where the sequence stands."""
        return self.machine.state

    @property
    def ended(self) -> bool:
        """True when nothing more will come."""
        return self.state.phase is Phase.DONE


Untold = deque[tuple[Running, Commit | None, RoundRecord | None]]
"""Notifications for clients and observers, held back until the workers have their next commands."""
