"""Reading prompts before anybody asks: the draft has its entries when the target has its own.

A sequence is opened while the target prefills it, if its next round will ask for draft tokens. Where the
draft has a device or a core to itself, that is time in which it would wait; its first proposal then does not
wait for the prompt. Nobody waits for what is read here, so it is read in short passes that rounds come
before, and what goes wrong is left to the round, which reads what is missing.
"""

from __future__ import annotations

from collections.abc import Callable

from draft_worker.runner import Runner
from paceline.core.clock import Clock
from paceline.core.messages import DraftProposal
from paceline.engine.scheduling.passes import Job, run_pass
from paceline.engine.scheduling.sequences import HeldSequence, HeldSequences
from paceline.telemetry.worker import Passes

ROWS = 64
"""Of one pass: a round that arrives waits for it. While others run it is no more than is read beside them."""


class Reading:
    """The sequences that were opened, and which no round has asked for yet."""

    def __init__(
        self,
        runner: Runner,
        sequences: HeldSequences[DraftProposal],
        spare: Callable[[], bool],
        passes: Passes,
        clock: Clock,
        budget: int,
        beside: int | None,
    ) -> None:
        """`spare` gives back blocks that are worth less than a prompt's; False when there were none.

        `budget`: rows of a pass. `beside`: rows of prefill in a pass that others wait for.
        """
        self._runner = runner
        self._holdings = sequences
        self._spare = spare
        self._passes = passes
        self._clock = clock
        self._alone = min(ROWS, budget)
        self._beside = self._alone if beside is None else min(beside, self._alone)
        self._waiting: dict[str, HeldSequence[DraftProposal]] = {}
        self._seconds: dict[str, float] = {}
        """What was read so far took, by sequence."""

    @property
    def has_work(self) -> bool:
        """True while a prompt is not read."""
        return bool(self._waiting)

    def begin(self, sequence_id: str) -> None:
        """A sequence was opened."""
        self._waiting[sequence_id] = self._holdings.get(sequence_id)
        self._seconds[sequence_id] = 0.0

    def leave(self, sequence_id: str) -> float:
        """A round goes on with it, or nobody; returns the seconds that were spent on it."""
        self._waiting.pop(sequence_id, None)
        return self._seconds.pop(sequence_id, 0.0)

    def step(self) -> None:
        """One pass over what was opened first."""
        sequence_id, held = next(iter(self._waiting.items()))
        # Made anew each time: meanwhile a round of another sequence may have taken its blocks.
        job = Job(held, held.session.tokens[held.table.length :], rows=1, arrived=self._clock())
        if job.feed:
            rows = self._beside if len(self._holdings) > 1 else self._alone
            result = run_pass(
                [job], self._runner, rows, self._clock, self._holdings, self._spare, passes=self._passes
            )
            self._seconds[sequence_id] += job.compute
            if not (result.finished or result.failed):
                return
        del self._waiting[sequence_id]
