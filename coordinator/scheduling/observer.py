"""The interface of observers of sequences: metrics, traces and log lines are built on it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from coordinator.sequence.round_record import RoundRecord

if TYPE_CHECKING:
    from coordinator.scheduling.running_sequence import Running

log = logging.getLogger(__name__)


class SequenceObserver(Protocol):
    """The dispatcher calls this on the event loop. Exceptions raised here are logged."""

    def round_ended(self, running: Running, record: RoundRecord, now: float) -> None:
        """A round was committed, and the next one has been sent."""

    def sequence_ended(self, running: Running, now: float) -> None:
        """A sequence has finished, failed or been left by its client."""

    def worker_lost(self, role: str) -> None:
        """A running sequence has lost its worker and goes on without it, or with another."""

    def blocks_awaited(self) -> None:
        """A sequence waits for blocks, whether or not it had any."""


AnyObserver = TypeVar("AnyObserver", bound=SequenceObserver)


def tell_all(observers: Sequence[AnyObserver], tell: Callable[[AnyObserver], None]) -> None:
    """Call `tell` with each observer, also when one of them fails."""
    for observer in observers:
        try:
            tell(observer)
        except Exception:
            log.exception("an observer failed")
