"""Events into the round machine and actions out of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from coordinator.sequence.ledger import Commit
from paceline.core.errors import PacelineError, ResourceExhaustedError
from paceline.core.messages import (
    DraftCommand,
    DraftEvent,
    PromptLogprobs,
    RoundVerdict,
    SequenceFailed,
    TargetCommand,
)


class Phase(enum.Enum):
    """The state of a sequence, by what it waits for."""

    NEW = "new"
    DRAFTING = "a proposal"
    VERIFYING = "a verdict"
    STALLED = "a target worker"
    WAITING = "free blocks"
    PAUSED = "its client"
    DONE = "nothing"


@dataclass(frozen=True, slots=True)
class ToTarget:
    """Send to the sequence's target worker."""

    command: TargetCommand


@dataclass(frozen=True, slots=True)
class ToDraft:
    """Send to a draft worker of the sequence."""

    command: DraftCommand
    draft: int = 0
    """Which of the sequence's drafts."""


@dataclass(frozen=True, slots=True)
class Emit:
    """Send a commit to the client."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class Fail:
    """End the sequence with an error."""

    error: PacelineError


@dataclass(frozen=True, slots=True)
class WaitForBlocks:
    """Resume the sequence when another sequence has freed blocks."""

    error: ResourceExhaustedError
    preempted: bool = False
    """True if the sequence lost its blocks to an older one."""


@dataclass(frozen=True, slots=True)
class TargetHangs:
    """The target worker did not answer this sequence in time: find out if it answers others."""


Action = ToTarget | ToDraft | Emit | Fail | WaitForBlocks | TargetHangs


class Signal(enum.Enum):
    """Events without content."""

    ADMITTED = "admitted to run"
    TARGET_READY = "a target worker is available"
    TARGET_LOST = "the target worker is gone"
    TARGET_LATE = "the target worker is late but answers others, and is kept"
    TARGET_LEFT = "the target worker is late or stopping, and another one takes the sequence"
    BLOCKS_FREED = "blocks were freed on the target"
    BLOCKS_WANTED = "another sequence waits for blocks"
    DEADLINE = "the deadline passed"
    CLIENT_BEHIND = "the client has too much to read"
    CLIENT_CAUGHT_UP = "the client has read enough"
    CANCEL = "the client went away"


@dataclass(frozen=True, slots=True)
class DraftReady:
    """A draft worker is available."""

    draft: int = 0
    """Which of the sequence's drafts it is, as in the events below."""


@dataclass(frozen=True, slots=True)
class DraftLost:
    """A draft worker is gone."""

    draft: int = 0


@dataclass(frozen=True, slots=True)
class DraftLeft:
    """A draft worker is stopping, and another one takes the sequence."""

    draft: int = 0


@dataclass(frozen=True, slots=True)
class FromDraft:
    """A draft worker answered, or refused or failed something."""

    event: DraftEvent
    draft: int = 0


@dataclass(frozen=True, slots=True)
class FromTarget:
    """The target worker refused or failed something."""

    failure: SequenceFailed


Event = Signal | DraftReady | DraftLost | DraftLeft | FromDraft | RoundVerdict | PromptLogprobs | FromTarget


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Maximum seconds of each phase."""

    draft: float
    target: float
    recovery: float
