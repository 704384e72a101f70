"""The places of those that run, and the row of those that wait for one. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from coordinator.scheduling.block_waiters import Blocks
from coordinator.scheduling.running_sequence import Running
from paceline.core.clock import Clock
from paceline.core.errors import InvalidArgumentError, ResourceExhaustedError


class Admission:
    """Of one dispatcher's sequences."""

    def __init__(
        self,
        sequences: Mapping[str, Running],
        blocks: Blocks,
        clock: Clock,
        max_running: int,
        max_waiting: int,
    ) -> None:
        """`sequences` is the caller's own, by id: those that run, and those in the row."""
        self._sequences = sequences
        self._blocks = blocks
        self._clock = clock
        self.max_running = max_running
        self.max_waiting = max_waiting
        self._row: deque[Running] = deque()
        self._admitting = False

    @property
    def running(self) -> int:
        """Sequences that have a place."""
        return len(self._sequences) - len(self._row)

    @property
    def waiting(self) -> int:
        """Sequences that wait for one."""
        return len(self._row)

    def check_fits(self, n: int) -> None:
        """Raises InvalidArgumentError where a request has more sequences than may ever be here."""
        most = self.max_running + self.max_waiting
        if n > most:
            raise InvalidArgumentError("n", f"must be at most {most} over all prompts: no more run or wait")

    def check_room(self) -> None:
        """Raises ResourceExhaustedError where one more would neither run nor wait."""
        if len(self._row) >= self.max_waiting and not self._has_place:
            raise ResourceExhaustedError(f"{self.max_waiting} sequences are waiting already; try later")

    def join(self, running: Running) -> None:
        """The last in the row from now on."""
        self._row.append(running)

    def leave(self, running: Running) -> None:
        """One that ended, wherever it was."""
        if not running.admitted:
            self._row.remove(running)

    def admit(self, begin: Callable[[Running], None]) -> None:
        """Let in whoever there is a place for. One that ends as it begins leads here again: the next one's
        turn comes when it has ended, not within its end, for any number may end like that."""
        if self._admitting:
            return
        self._admitting = True
        try:
            while self._row and self._has_place:
                running = self._row.popleft()
                running.admitted, running.admitted_at = True, self._clock()
                if not running.ended:
                    begin(running)
        finally:
            self._admitting = False

    @property
    def _has_place(self) -> bool:
        """Not past one that waits for blocks: a new sequence would only have to give them up again."""
        return self.running < self.max_running and not self._blocks.keep_others_out
