"""What a sequence believes of its workers, and the commands that follow from it. Pure.

A worker is sent the tokens that it is believed to lack; when the belief is wrong it says so, and the round
is sent again (docs/protocol.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from coordinator.sequence.ledger import Ledger
from paceline.core.messages import (
    CloseSequence,
    Continuations,
    DraftProposal,
    DraftRound,
    OpenSequence,
    PromptLogprobs,
    RoundVerdict,
    VerifyAhead,
    VerifyRound,
)
from paceline.core.types import Proposal, SequenceParams

MAX_PAUSE_ROUNDS = 64
"""Longest pause, in rounds, after repeated failures of the draft."""


@dataclass(slots=True)
class Peer:
    """One worker, as one sequence sees it."""

    sequence_id: str
    ready: bool = False
    """A worker is assigned and reachable."""
    open: bool = False
    """It has the sequence."""
    epoch: int = 0
    known: int = 0
    """Ledger tokens it has."""
    sent_at: float = 0.0

    def lose(self) -> None:
        """The worker is gone, and with it what it knew."""
        self.ready = self.open = False

    def behind(self, known: int, ledger: Ledger) -> None:
        """It says that it has so many tokens only."""
        self.known = min(known, len(ledger))

    def answers(
        self, event: DraftProposal | Continuations | RoundVerdict | PromptLogprobs, round_number: int
    ) -> bool:
        """True when the event belongs to this opening and this round."""
        return event.epoch == self.epoch and event.round == round_number

    def opening(self, ledger: Ledger, params: SequenceParams) -> list[OpenSequence]:
        """The command that gives it the sequence, if it does not have it."""
        if self.open:
            return []
        self.epoch += 1
        self.open, self.known = True, len(ledger)
        return [OpenSequence(self.sequence_id, self.epoch, tuple(ledger.token_ids), params)]

    def tail(self, ledger: Ledger) -> tuple[int, ...]:
        """What it lacks; it has everything from now on."""
        tail = tuple(ledger.token_ids[self.known :])
        self.known = len(ledger)
        return tail

    def closing(self) -> list[CloseSequence]:
        """The command that frees its blocks, if it may hold any."""
        was_open, self.open = self.open, False
        return [CloseSequence(self.sequence_id, self.epoch)] if was_open and self.ready else []


@dataclass(slots=True)
class TargetPeer(Peer):
    """The target worker."""

    attempts: int = 0
    """Times the present round was refused."""
    losses: int = 0
    """Times the worker was lost while it had the present round."""
    computed: bool = False
    """It has entries of the sequence: since its last verdict nothing was heard of their loss."""

    def verify(
        self, ledger: Ledger, params: SequenceParams, round_number: int, proposal: Proposal
    ) -> list[OpenSequence | VerifyRound]:
        """The round."""
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
        proposals: Mapping[tuple[int, int], Proposal],
        *,
        plain_otherwise: bool = False,
    ) -> VerifyAhead:
        """The next round, for outcomes of the present one; after others it may have no draft tokens."""
        where = self.sequence_id, self.epoch, round_number, len(ledger)
        return VerifyAhead(*where, proposals, plain_otherwise)


@dataclass(slots=True)
class DraftPeer(Peer):
    """The draft worker. After failures it is left alone, twice as long every time."""

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
        return Peer.opening(self, ledger, params)

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
