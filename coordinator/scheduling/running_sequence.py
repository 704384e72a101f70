"""One sequence as the shell holds it: its machine, its workers, and what its client has not read yet."""

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
"""What a client has not been given yet."""

UNREAD = "the client does not read; the request may be resumed"
"""Why a sequence ends whose client leaves too much of it."""


@dataclass(slots=True, eq=False)
class Running:
    """One sequence with its workers and its client."""

    machine: RoundMachine
    target: Link | None = None
    draft: Link | None = None
    admitted: bool = False
    order: int = 0
    """Of admission: the oldest sequence has the smallest."""
    was_blocked: bool = False
    alone_since: float | None = None
    """Since when it lacks blocks although no other sequence holds any."""
    ask_at: float | None = None
    """When it asks for blocks again, whoever holds them; None where its worker did not say when."""
    tenant: str = ""
    """The name of the API key that its request came with; empty where there are no keys."""
    error: PacelineError | None = None
    """What it failed with."""
    arrived_at: float = 0.0
    """When its request came."""
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    received: int = field(init=False)
    """Tokens that its client had before this coordinator generated any."""
    replay: ReplayBuffer | None = None
    """What was emitted, where the client may come back for it."""
    unread: int = 0
    behind_since: float | None = None
    """Since when it pauses for a client that does not read."""
    read: bool = True
    """False while its client's connection is lost: then it has the time that requests are held for."""
    parts: Parts = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.received = self.state.ledger.num_generated

    @property
    def state(self) -> RoundState:
        """Where the sequence stands."""
        return self.machine.state

    @property
    def ended(self) -> bool:
        """True when nothing more will come."""
        return self.state.phase is Phase.DONE


Untold = deque[tuple[Running, Commit | None, RoundRecord | None]]
"""What clients and observers are told, in order, once the workers have what a frame of answers led to."""
