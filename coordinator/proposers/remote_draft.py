"""Draft tokens from one draft worker: requests, its read position, and pauses after failures. Pure.

Its answers are events of the round (`FromDraft`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from coordinator.sequence.ledger import Ledger
from coordinator.sequence.round_record import DRAFT
from coordinator.sequence.worker_view import WorkerView
from paceline.core.messages import DraftRound, OpenSequence
from paceline.core.types import CHAIN, SequenceParams, TreeShape

MAX_PAUSE_ROUNDS = 64
"""Longest pause after repeated failures of the draft, in rounds."""


class Wanted(NamedTuple):
    """What a draft is asked for."""

    num_draft: int
    """K, or the depth of a tree."""
    shape: TreeShape = CHAIN
    alone: bool = True
    """False if others are asked for the same round. Their proposals are merged, so the outcomes that a draft
    can foresee, from its own proposal, are not those of the round."""


@dataclass(slots=True)
class RemoteDraft(WorkerView):
    """A draft worker of one sequence. Each failure doubles the pause before it is asked again."""

    name: ClassVar[str] = DRAFT

    index: int = 0
    """Which of the sequence's drafts it is."""
    max_len: int = 0
    """Ledger and draft tokens that it can hold."""
    max_nodes: int = 0
    """Nodes of the largest tree that it proposes; 0 for chains only."""
    read: int = 0
    """Number of ledger tokens that the worker is known to have read."""
    wanted: Wanted | None = None
    """What it was asked for; None unless its answer is awaited."""
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
        if self.open:
            return []
        self.read = 0
        return WorkerView.opening(self, ledger, replace(params, draft_index=self.index))

    def unread(self, ledger: Ledger) -> int:
        """Number of ledger tokens that the worker may have to read; tokens just sent may still be unread."""
        return len(ledger) - (min(self.read, self.known) if self.open else 0)

    def has_read(self, ledger: Ledger) -> None:
        """The worker has drafted after the whole ledger."""
        self.read = len(ledger)

    def room(self, length: int) -> int:
        """Most draft tokens after `length` tokens: the last one needs no entry. May be negative."""
        return self.max_len - length + 1

    def within(self, shape: TreeShape) -> TreeShape:
        """The part of these bounds that the worker can follow."""
        if shape.is_chain or not self.max_nodes:
            return CHAIN
        return TreeShape(shape.width, min(shape.nodes, self.max_nodes))

    def usable(self, round_number: int) -> bool:
        """True unless the worker is gone or paused."""
        return self.ready and round_number >= self.paused_until

    def pause(self, round_number: int) -> None:
        """Pause the worker after a failure in this round."""
        rounds = min(2**self.failures, MAX_PAUSE_ROUNDS)
        self.failures += 1
        self.paused_until = round_number + 1 + rounds

    def ask(
        self, ledger: Ledger, params: SequenceParams, round_number: int
    ) -> list[OpenSequence | DraftRound]:
        """The commands that ask for the proposal that is wanted."""
        assert self.wanted is not None
        opening = self.opening(ledger, params)
        return [*opening, self._round(ledger, round_number, self.wanted)]

    def follow(self, ledger: Ledger, round_number: int, known: Wanted, num_ahead: int) -> DraftRound:
        """Continue with a worker whose continuation came true; request `num_ahead` tokens for the next."""
        asked = self._round(ledger, round_number, known)
        return replace(asked, num_lookahead_tokens=num_ahead, proposal_known=True)

    def _round(self, ledger: Ledger, round_number: int, wanted: Wanted) -> DraftRound:
        base, tail = len(ledger), self.tail(ledger)
        return DraftRound(
            self.sequence_id,
            self.epoch,
            round_number,
            base,
            tail,
            wanted.num_draft,
            shape=wanted.shape,
            no_lookahead=not wanted.alone,
        )
