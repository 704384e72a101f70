"""Draft tokens from a draft worker: requests, its read position, and pauses after failures. Pure.

Its answers are events of the round (`DraftProposal`, `Continuations`, `FromDraft`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from coordinator.sequence.ledger import Ledger
from coordinator.sequence.round_record import DRAFT
from coordinator.sequence.worker_view import WorkerView
from paceline.core.messages import DraftRound, OpenSequence
from paceline.core.types import CHAIN, SequenceParams, TreeShape

MAX_PAUSE_ROUNDS = 64
"""Longest pause after repeated failures of the draft, in rounds."""


@dataclass(slots=True)
class RemoteDraft(WorkerView):
    """The draft worker of one sequence. Each failure doubles the pause before it is asked again."""

    name: ClassVar[str] = DRAFT

    read: int = 0
    """Number of ledger tokens that the worker is known to have read."""
    retried: bool = False
    """True if the current round was already sent again."""
    sub_drafted: bool = False
    """The worker has a sub-drafter, so the time of its proposals depends on what is drawn."""
    failures: int = 0
    paused_until: int = 0

    def arrive(self) -> None:
        """A new worker is there, without any state."""
        self.ready, self.open = True, False
        self.failures = self.paused_until = 0

    def opening(self, ledger: Ledger, params: SequenceParams) -> list[OpenSequence]:
        """Open the sequence as on any worker; the read position starts at 0."""
        if not self.open:
            self.read = 0
        return WorkerView.opening(self, ledger, params)

    def unread(self, ledger: Ledger) -> int:
        """Number of ledger tokens that the worker may have to read; tokens just sent may still be unread."""
        return len(ledger) - (min(self.read, self.known) if self.open else 0)

    def has_read(self, ledger: Ledger) -> None:
        """The worker has drafted after the whole ledger."""
        self.read = len(ledger)

    def usable(self, round_number: int) -> bool:
        """True unless the worker is gone or paused."""
        return self.ready and round_number >= self.paused_until

    def pause(self, round_number: int) -> None:
        """Pause the worker after a failure in this round."""
        rounds = min(2**self.failures, MAX_PAUSE_ROUNDS)
        self.failures += 1
        self.paused_until = round_number + 1 + rounds

    def ask(
        self,
        ledger: Ledger,
        params: SequenceParams,
        round_number: int,
        num_draft: int,
        shape: TreeShape = CHAIN,
    ) -> list[OpenSequence | DraftRound]:
        """The commands that ask for the round's proposal."""
        opening = self.opening(ledger, params)
        return [*opening, self._round(ledger, round_number, num_draft, shape)]

    def follow(
        self, ledger: Ledger, round_number: int, num_draft: int, num_ahead: int, shape: TreeShape
    ) -> DraftRound:
        """Continue with a worker whose continuation came true; request `num_ahead` tokens for the next."""
        known = self._round(ledger, round_number, num_draft, shape)
        return replace(known, num_lookahead_tokens=num_ahead, proposal_known=True)

    def _round(self, ledger: Ledger, round_number: int, num_draft: int, shape: TreeShape) -> DraftRound:
        base, tail = len(ledger), self.tail(ledger)
        return DraftRound(self.sequence_id, self.epoch, round_number, base, tail, num_draft, shape=shape)
