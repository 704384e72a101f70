"""Sequences that wait for cache blocks of a target worker, and when each tries again.

Each worker has its own blocks. When blocks of a worker are freed, the oldest sequence that waits for that
worker tries again; the others wait while any sequence holds blocks there. Sequences of another coordinator
may hold blocks as well, and nothing here tells when they free them. Then the oldest sequence asks again after
the time that the worker told it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from coordinator.scheduling.running_sequence import Running
from coordinator.sequence.messages import Event, Phase, Signal
from coordinator.workers.links import Link
from paceline.core.errors import ResourceExhaustedError

GRACE_SECONDS = 1.0
"""How long a sequence that lacks blocks goes on trying although no other one holds any."""


class Blocks:
    """The waiting sequences of a coordinator, on all of its targets."""

    def __init__(self, sequences: Mapping[str, Running], tell: Callable[[Running, Event], None]) -> None:
        """`sequences` belongs to the caller, by id; `tell` gives a signal to one of them."""
        self._sequences = sequences
        self._tell = tell
        self._blocked: list[Running] = []
        self._asking: list[Running] = []
        """Sequences that ask again although no sequence here freed any blocks."""

    @property
    def waiting(self) -> list[Running]:
        """Sequences that were refused blocks and still wait for them."""
        return [running for running in self._blocked if running.state.phase is Phase.WAITING]

    @property
    def keep_others_out(self) -> bool:
        """True while a sequence lacks blocks: it comes before all sequences that have yet to begin."""
        return any(map(_asks, self._asking)) or bool(self.waiting)

    def refused(self, running: Running, error: ResourceExhaustedError, now: float) -> bool:
        """A worker had no blocks for this sequence. Returns True if the sequence waits for some.

        It waits while another sequence holds blocks that it may give back. With no such sequence, here or at
        another coordinator (only the worker knows those), no blocks would ever be freed.
        """
        running.was_blocked = True
        running.ask_at = None if error.retry_after is None else now + error.retry_after
        self._asking = [each for each in self._asking if each is not running]
        if self._held_on(running.target) or error.retry_after is not None:
            running.alone_since = None
            self._wait(running)
            return True
        if running.alone_since is None:
            # The sequences that it competed with have given their blocks back: the oldest may fit now.
            running.alone_since = now
            self._wait(running)
            self.wake_oldest(running.target)
            return True
        # A worker may not have noticed yet that a stream, with all blocks it held, is over.
        grace = now - running.alone_since < GRACE_SECONDS
        if grace:
            self._wait(running)
        return grace

    def granted(self, running: Running) -> bool:
        """The sequence has a verdict. Returns True if it had lacked blocks: then the next one may try."""
        if not running.was_blocked:
            return False
        running.was_blocked, running.alone_since = False, None
        self.wake_oldest(running.target)
        return True

    def wake_oldest(self, link: Link | None) -> None:
        """Let the oldest sequence that waits for this worker try again. It may preempt younger ones."""
        oldest = self._oldest(link)
        if oldest is not None:
            self._blocked.remove(oldest)
            self._tell(oldest, Signal.BLOCKS_FREED)

    def sweep(self, now: float) -> int:
        """Wake sequences that no event wakes. Returns how many paused sequences lost their blocks.

        A paused sequence whose client does not read gives its blocks up for those that wait.
        """
        taken = 0
        self._asking = [running for running in self._asking if _asks(running)]
        for link in dict.fromkeys(running.target for running in self.waiting):
            paused = [r for r in self._on(link) if r.state.phase is Phase.PAUSED and r.state.holds_target]
            for running in paused:
                taken += 1
                self._tell(running, Signal.BLOCKS_WANTED)
            if paused or not self._held_on(link):
                self.wake_oldest(link)
            elif (oldest := self._oldest(link)) and oldest.ask_at is not None and now >= oldest.ask_at:
                self._asking.append(oldest)
                self.wake_oldest(link)
        return taken

    def _oldest(self, link: Link | None) -> Running | None:
        self._blocked = self.waiting
        here = [running for running in self._blocked if running.target is link]
        return min(here, key=lambda running: running.order, default=None)

    def _on(self, link: Link | None) -> list[Running]:
        return [running for running in self._sequences.values() if running.target is link]

    def _held_on(self, link: Link | None) -> bool:
        return any(running.state.holds_target for running in self._on(link))

    def _wait(self, running: Running) -> None:
        if running not in self._blocked:
            self._blocked.append(running)


def _asks(running: Running) -> bool:
    return running.was_blocked and running.state.phase is Phase.VERIFYING
