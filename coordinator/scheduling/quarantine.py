"""Sequences whose rounds may kill target workers: their rounds are sent one at a time. Pure.

A worker that dies does not say why, and it takes down every round it had: the one that its model breaks on,
those that shared the pass, and those that waited. If all of them were sent again at once, each death would
count against all. So a sequence that was present at several deaths is a suspect: it waits until no other
suspect's round is at a target, and then runs among sequences that are not suspected. A verdict clears a
suspect. If the worker dies again, the suspect goes to the end of the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from coordinator.scheduling.running_sequence import Running
from coordinator.sequence.messages import Phase
from coordinator.workers.links import Link

SUSPECT = 2
"""Target workers lost in one round that make a sequence a suspect."""


class Suspects:
    """The suspects among the sequences of one dispatcher."""

    def __init__(self, sequences: Mapping[str, Running]) -> None:
        self._sequences = sequences
        self.waiting: dict[str, Running] = {}
        self._giving = False

    def holds_back(self, running: Running) -> bool:
        """True if this sequence, which has no target, is a suspect and must wait for its turn."""
        if running.state.losses >= SUSPECT:
            self.waiting[running.state.sequence_id] = running
            return True
        return False

    def give_turns(self, targets: Sequence[Link], give: Callable[[Running, Link], None]) -> None:
        """Give a target to each suspect whose turn it is. One that ends on its turn calls this again."""
        if self._giving or not self.waiting:
            return
        self._giving = True
        try:
            while self.waiting and (link := self._calm(targets)) is not None:
                # Fewest losses first: the sequence to blame has the most.
                running = min(self.waiting.values(), key=lambda each: (each.state.losses, each.order))
                self.forget(running)
                give(running, link)
        finally:
            self._giving = False

    def keep_waiting(self, targets: Sequence[Link], now: float) -> None:
        """Extend the suspects' recovery deadlines while any target is ready."""
        if any(link.ready for link in targets):
            for running in self.waiting.values():
                running.state.await_turn(now)

    def forget(self, running: Running) -> None:
        """The sequence has its turn, or has ended."""
        self.waiting.pop(running.state.sequence_id, None)

    def _calm(self, targets: Sequence[Link]) -> Link | None:
        calm = [link for link in targets if link.ready and not self._is_doubtful(link)]
        return min(calm, key=lambda link: link.load, default=None)

    def _is_doubtful(self, link: Link) -> bool:
        """True while the target has a round that was present when a worker died.

        A sequence that waits for blocks or for its client has no round there.
        """
        return any(
            running.target is link and running.state.losses and running.state.phase is Phase.VERIFYING
            for running in self._sequences.values()
        )
