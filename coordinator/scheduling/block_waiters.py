"""Who waits for cache blocks of a target worker, and who tries again when some are free.

A worker has its own blocks: those that wait for one are woken by what happens there, oldest first, and
wait on while somebody holds blocks there. Where that may be another coordinator's, nothing that happens here
tells when it gives them back: the oldest asks again and again, after the time that the worker told it.
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
    """Of all sequences of a coordinator."""

    def __init__(self, sequences: Mapping[str, Running], tell: Callable[[Running, Event], None]) -> None:
        """`sequences` is the caller's own, by id; `tell` gives a signal to one of them."""
        self._sequences = sequences
        self._tell = tell
        self._blocked: list[Running] = []
        self._asking: list[Running] = []
        """Those that ask again although nobody here gave any back."""

    @property
    def waiting(self) -> list[Running]:
        """Sequences that wait for blocks, whatever has become of them since they were refused."""
        return [running for running in self._blocked if running.state.phase is Phase.WAITING]

    @property
    def keep_others_out(self) -> bool:
        """True while somebody lacks blocks who comes before all that have yet to begin."""
        return any(map(_asks, self._asking)) or bool(self.waiting)

    def refused(self, running: Running, error: ResourceExhaustedError, now: float) -> bool:
        """A worker had none for it. True if it waits for another one to give some back; with no other one
        they would never come. Of the sequences of other coordinators only the worker knows."""
        running.was_blocked = True
        running.ask_at = None if error.retry_after is None else now + error.retry_after
        self._asking = [each for each in self._asking if each is not running]
        if self._held_on(running.target) or error.retry_after is not None:
            running.alone_since = None
            self._wait(running)
            return True
        if running.alone_since is None:
            # Those it competed with gave theirs back since: the oldest may fit now that nobody has any.
            running.alone_since = now
            self._wait(running)
            self.wake_oldest(running.target)
            return True
        # A worker may not have learned yet that a stream, and all that it held, is over.
        grace = now - running.alone_since < GRACE_SECONDS
        if grace:
            self._wait(running)
        return grace

    def granted(self, running: Running) -> bool:
        """It has a verdict: True where it had lacked blocks, so that the next one may try."""
        if not running.was_blocked:
            return False
        running.was_blocked, running.alone_since = False, None
        self.wake_oldest(running.target)
        return True

    def wake_oldest(self, link: Link | None) -> None:
        """Of those that wait for this worker the oldest tries again; it may have what younger ones hold."""
        oldest = self._oldest(link)
        if oldest is not None:
            self._blocked.remove(oldest)
            self._tell(oldest, Signal.BLOCKS_FREED)

    def sweep(self, now: float) -> int:
        """Wake those that nobody else would. Returns how many sequences lost theirs to them.

        A client that does not read must not keep the others waiting, nor a worker that has blocks again.
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
