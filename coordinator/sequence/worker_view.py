"""A sequence's view of its workers, and the commands derived from the view. Pure.

A worker is sent the tokens that it is believed to lack. If the view is wrong, the worker says so and the
round is sent again (docs/protocol.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from coordinator.sequence.ledger import Ledger
from paceline.core.messages import (
    CloseSequence,
    Continuations,
    DraftProposal,
    OpenSequence,
    PromptLogprobs,
    RoundVerdict,
    VerifyAhead,
    VerifyRound,
)
from paceline.core.types import Outcome, Proposal, SequenceParams


@dataclass(slots=True)
class WorkerView:
    """One worker, as one sequence sees it."""

    sequence_id: str
    epochs: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Numbers for the openings of the sequence, ascending."""
    ready: bool = False
    """True if a worker is assigned and reachable."""
    open: bool = False
    """True if the worker has the sequence."""
    epoch: int = 0
    known: int = 0
    """Number of ledger tokens that the worker has."""
    sent_at: float = 0.0

    def lose(self) -> None:
        """The worker is gone, with all of its state."""
        self.ready = self.open = False

    def behind(self, known: int, ledger: Ledger) -> None:
        """The worker reports that it has only `known` tokens."""
        self.known = min(known, len(ledger))

    def answers(
        self, event: DraftProposal | Continuations | RoundVerdict | PromptLogprobs, round_number: int
    ) -> bool:
        """True when the event belongs to this opening and this round."""
        return event.epoch == self.epoch and event.round == round_number

    def opening(self, ledger: Ledger, params: SequenceParams) -> list[OpenSequence]:
        """The command that opens the sequence on the worker, if it is not open."""
        if self.open:
            return []
        self.epoch = next(self.epochs)
        self.open, self.known = True, len(ledger)
        return [OpenSequence(self.sequence_id, self.epoch, tuple(ledger.token_ids), params)]

    def tail(self, ledger: Ledger) -> tuple[int, ...]:
        """The tokens that the worker lacks. It is taken to have all tokens afterwards."""
        tail = tuple(ledger.token_ids[self.known :])
        self.known = len(ledger)
        return tail

    def closing(self) -> list[CloseSequence]:
        """The command that frees the worker's blocks, if it may hold any."""
        was_open, self.open = self.open, False
        return [CloseSequence(self.sequence_id, self.epoch)] if was_open and self.ready else []


@dataclass(slots=True)
class TargetView(WorkerView):
    """The target worker, as one sequence sees it."""

    attempts: int = 0
    """Number of times that the current round was refused."""
    losses: int = 0
    """Number of times that the worker was lost during the current round."""
    computed: bool = False
    """True if the worker has cache entries of the sequence: none were lost since its last verdict."""

    def verify(
        self, ledger: Ledger, params: SequenceParams, round_number: int, proposal: Proposal
    ) -> list[OpenSequence | VerifyRound]:
        """The commands that send the round."""
        opening = self.opening(ledger, params)
        if opening:
            self.computed = False
        base, tail = len(ledger), self.tail(ledger)
        return [
            *opening,
            VerifyRound(self.sequence_id, self.epoch, round_number, base, tail, proposal),
        ]

    def ahead(
        self,
        ledger: Ledger,
        round_number: int,
        proposals: Mapping[Outcome, Proposal],
        *,
        plain_otherwise: bool = False,
    ) -> VerifyAhead:
        """The next round, for outcomes of the current one; others may get a round without draft tokens."""
        where = self.sequence_id, self.epoch, round_number, len(ledger)
        return VerifyAhead(*where, proposals, plain_otherwise)
