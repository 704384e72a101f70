"""Draft tokens from a draft worker: what it is asked, what it has read, and when it is left alone. Pure.

Its answers are events of the round (`DraftProposal`, `Continuations`, `FromDraft`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from coordinator.sequence.ledger import Ledger
from coordinator.sequence.round_record import DRAFT
from coordinator.sequence.worker_view import WorkerView
from paceline.core.messages import DraftRound, OpenSequence
from paceline.core.types import SequenceParams

MAX_PAUSE_ROUNDS = 64
"""Longest pause, in rounds, after repeated failures of the draft."""


@dataclass(slots=True)
class RemoteDraft(WorkerView):
    """The draft worker of one sequence. After failures it is left alone, twice as long every time."""

    name: ClassVar[str] = DRAFT

    read: int = 0
    """Ledger tokens that it is known to have read."""
    retried: bool = False
    """The present round was sent again already."""
    failures: int = 0
    paused_until: int = 0

    def arrive(self) -> None:
        """A worker is there: a new one, which knows nothing."""
        self.ready, self.open = True, False
        self.failures = self.paused_until = 0

    def opening(self, ledger: Ledger, params: SequenceParams) -> list[OpenSequence]:
        """As any worker's; it has read nothing then."""
        if not self.open:
            self.read = 0
        return WorkerView.opening(self, ledger, params)

    def unread(self, ledger: Ledger) -> int:
        """Ledger tokens that it may have to read: what it was sent it may be reading still."""
        return len(ledger) - (min(self.read, self.known) if self.open else 0)

    def has_read(self, ledger: Ledger) -> None:
        """It has drafted behind the ledger as it is."""
        self.read = len(ledger)

    def usable(self, round_number: int) -> bool:
        """True unless it is gone or left alone."""
        return self.ready and round_number >= self.paused_until

    def pause(self, round_number: int) -> None:
        """It failed in this round."""
        rounds = min(2**self.failures, MAX_PAUSE_ROUNDS)
        self.failures += 1
        self.paused_until = round_number + 1 + rounds

    def ask(
        self, ledger: Ledger, params: SequenceParams, round_number: int, num_draft: int
    ) -> list[OpenSequence | DraftRound]:
        """The round."""
        opening = self.opening(ledger, params)
        return [*opening, self._round(ledger, round_number, num_draft)]

    def follow(self, ledger: Ledger, round_number: int, num_draft: int, num_ahead: int) -> DraftRound:
        """To a worker whose continuation came true: the next ones are to have `num_ahead` tokens."""
        return replace(
            self._round(ledger, round_number, num_draft), num_lookahead_tokens=num_ahead, proposal_known=True
        )

    def _round(self, ledger: Ledger, round_number: int, num_draft: int) -> DraftRound:
        base, tail = len(ledger), self.tail(ledger)
        return DraftRound(self.sequence_id, self.epoch, round_number, base, tail, num_draft)
