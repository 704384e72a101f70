"""Admission: how many sequences run at a time, and the queue of sequences that wait for a place. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from coordinator.scheduling.block_waiters import Blocks
from coordinator.scheduling.running_sequence import Running
from paceline.core.clock import Clock
from paceline.core.errors import InvalidArgumentError, ResourceExhaustedError


class Admission:
    """Admits the sequences of one dispatcher, first come, first served."""

    def __init__(
        self,
        sequences: Mapping[str, Running],
        blocks: Blocks,
        clock: Clock,
        max_running: int,
        max_waiting: int,
    ) -> None:
        """`sequences` belongs to the caller: running and queued sequences, by id."""
        self._sequences = sequences
        self._blocks = blocks
        self._clock = clock
        self.max_running = max_running
        self.max_waiting = max_waiting
        self._queue: deque[Running] = deque()
        self._admitting = False

    @property
    def running(self) -> int:
        """Sequences that have a place."""
        return len(self._sequences) - len(self._queue)

    @property
    def waiting(self) -> int:
        """Sequences that wait for a place."""
        return len(self._queue)

    def check_fits(self, n: int) -> None:
        """Raises InvalidArgumentError if a request has more sequences than may ever run and wait."""
        most = self.max_running + self.max_waiting
        if n > most:
            raise InvalidArgumentError("n", f"must be at most {most} over all prompts: no more run or wait")

    def check_room(self) -> None:
        """Raises ResourceExhaustedError if one more sequence could neither run nor wait."""
        if len(self._queue) >= self.max_waiting and not self._has_place:
            raise ResourceExhaustedError(f"{self.max_waiting} sequences are waiting already; try later")

    def join(self, running: Running) -> None:
        """Put a sequence at the end of the queue."""
        self._queue.append(running)

    def leave(self, running: Running) -> None:
        """Remove a sequence that ended, whether it ran or waited."""
        if not running.admitted:
            self._queue.remove(running)

    def admit(self, begin: Callable[[Running], None]) -> None:
        """Admit queued sequences while there are places, and `begin` each.

        A sequence that ends while it begins calls this method again. That inner call does nothing: the loop
        here admits the next sequence, so the stack stays flat however many end like that.
        """
        if self._admitting:
            return
        self._admitting = True
        try:
            while self._queue and self._has_place:
                running = self._queue.popleft()
                running.admitted, running.admitted_at = True, self._clock()
                if not running.ended:
                    begin(running)
        finally:
            self._admitting = False

    @property
    def _has_place(self) -> bool:
        """False while a sequence waits for blocks: a new one would only have to give its blocks up again."""
        return self.running < self.max_running and not self._blocks.keep_others_out
