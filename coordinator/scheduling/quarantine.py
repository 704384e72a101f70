"""Sequences whose rounds may be what kills target workers: these rounds are put one after another. Pure.

A worker that dies does not say of what, and all rounds that it was to judge are lost with it: that of the one
sequence which its model breaks on, those that shared its passes, those that had yet to wait. Were all of them
opened again at once, every death would count against all. So who was there at several of them waits until no
other such round is at a target, and goes alone among sequences that have nothing against them. Who gets a
verdict is cleared; who is there when the worker dies goes to the end of the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from coordinator.scheduling.running_sequence import Running
from coordinator.sequence.messages import Phase
from coordinator.workers.links import Link

SUSPECT = 2
"""Target workers lost in one round from which on a sequence waits for its turn."""


class Suspects:
    """Of one dispatcher's sequences."""

    def __init__(self, sequences: Mapping[str, Running]) -> None:
        self._sequences = sequences
        self.waiting: dict[str, Running] = {}
        self._giving = False

    def holds_back(self, running: Running) -> bool:
        """True where a sequence without a target waits for its turn."""
        if running.state.losses >= SUSPECT:
            self.waiting[running.state.sequence_id] = running
            return True
        return False

    def give_turns(self, targets: Sequence[Link], give: Callable[[Running, Link], None]) -> None:
        """Give each a target whose turn it is; one that ends on its turn leads here again."""
        if self._giving or not self.waiting:
            return
        self._giving = True
        try:
            while self.waiting and (link := self._calm(targets)) is not None:
                # Fewest losses first: whoever is to blame has the most.
                running = min(self.waiting.values(), key=lambda each: (each.state.losses, each.order))
                self.forget(running)
                give(running, link)
        finally:
            self._giving = False

    def keep_waiting(self, targets: Sequence[Link], now: float) -> None:
        """While a target is there the time to wait for one does not run."""
        if any(link.ready for link in targets):
            for running in self.waiting.values():
                running.state.await_turn(now)

    def forget(self, running: Running) -> None:
        """It has its turn, or ended."""
        self.waiting.pop(running.state.sequence_id, None)

    def _calm(self, targets: Sequence[Link]) -> Link | None:
        calm = [link for link in targets if link.ready and not self._is_doubtful(link)]
        return min(calm, key=lambda link: link.load, default=None)

    def _is_doubtful(self, link: Link) -> bool:
        """A round is there that was there when a worker died: the next death would be its as well.

        Who waits for blocks or for its client has none there.
        """
        return any(
            running.target is link and running.state.losses and running.state.phase is Phase.VERIFYING
            for running in self._sequences.values()
        )
