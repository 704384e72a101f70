"""Prefills prompts before a round asks, so that the draft's entries are ready when the target's are.

A sequence is opened while the target prefills it if its next round will ask for draft tokens. A draft on its
own device or core would otherwise be idle. This prefill has low priority: it runs in short passes, rounds go
first, and an error is left to the round, which feeds the missing tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from draft_worker.drafters.interface import Drafter
from paceline.core.clock import Clock
from paceline.core.messages import DraftProposal
from paceline.engine.scheduling.passes import Job
from paceline.engine.scheduling.sequences import HeldSequence
from paceline.telemetry.worker import Passes

ROWS = 64
"""Maximum rows of a pass, because an arriving round waits for the pass. While other sequences are held, at
most as many rows as in a mixed pass of rounds are used."""


class PrefillAhead:
    """Opened sequences that no round has asked for yet."""

    def __init__(
        self,
        drafter: Drafter,
        free_branches: Callable[[], bool],
        passes: Passes,
        clock: Clock,
        max_rows: int,
        max_mixed_rows: int | None,
    ) -> None:
        """`free_branches`, `passes`: as for `Drafter.step`. `max_rows`: maximum rows of a pass.

        `max_mixed_rows`: maximum rows of prefill in a pass that other sequences wait for.
        """
        self._drafter = drafter
        self._free_branches = free_branches
        self._passes = passes
        self._clock = clock
        self._rows_alone = min(ROWS, max_rows)
        self._rows_mixed = min(self._rows_alone, max_mixed_rows or self._rows_alone)
        self._waiting: dict[str, HeldSequence[DraftProposal]] = {}
        self._seconds: dict[str, float] = {}
        """Time of the passes so far, by sequence."""

    @property
    def has_work(self) -> bool:
        """True while a prompt is incomplete."""
        return bool(self._waiting)

    def add(self, sequence_id: str) -> None:
        """A sequence was opened."""
        self._waiting[sequence_id] = self._drafter.sequences.get(sequence_id)
        self._seconds[sequence_id] = 0.0

    def remove(self, sequence_id: str) -> float:
        """Remove a sequence that a round takes over or that is closed; returns the seconds spent on it."""
        self._waiting.pop(sequence_id, None)
        return self._seconds.pop(sequence_id, 0.0)

    def step(self) -> None:
        """Run one pass over the sequence that was opened first."""
        sequence_id, held = next(iter(self._waiting.items()))
        # Made anew each time, because a round of another sequence may have taken its blocks.
        job = Job(held, held.session.tokens[held.num_computed_tokens :], rows=1, arrived=self._clock())
        if job.feed:
            result = self._drafter.step(
                [job],
                max_rows=self._rows_mixed if len(self._drafter.sequences) > 1 else self._rows_alone,
                max_prefill_rows=None,
                free_branches=self._free_branches,
                passes=self._passes,
            )
            self._seconds[sequence_id] += job.compute
            if not (result.finished or result.failed):
                return
        del self._waiting[sequence_id]
