"""Decides when another K is tried, and for how long. Pure; time is counted in rounds.

A configuration that never runs is never measured, so at each load a few rounds are spent on another K at
doubling intervals. A trial uses the other regime (plain instead of drafted, or drafted instead of plain).
Every second trial, while drafting is best, uses a neighbouring K, which measures the slope of the costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SETTLING_ROUNDS = 4
"""Rounds of each sequence after a change of K that are not measured, because passes with both K overlap."""
TRIAL = 9
"""Length of a trial in rounds of each sequence, including the settling rounds."""
FIRST = 6
"""Rounds of each sequence at a load before its first trial."""
SHORTEST, LONGEST = 32, 1024
"""Rounds of each sequence between two trials, at first and at most. At most 1 % of the rounds are then
trials."""
EARLY_TRIALS = 4
"""Trials at a load that use the shortest interval."""
WORTH_TRYING = 0.7
"""A K is not tried if its expected goodput is below this share of the best one's. The first two trials and
those at the longest interval are exempt."""
FIRST_DRAFT = 2
"""K of a load's first trial of drafting."""
NEIGHBOUR = 2
"""Distance of the neighbouring K in a trial."""


@dataclass(slots=True)
class Exploration:
    """The trials of one load. Rounds are counted over all sequences at that load."""

    rounds: int = 0
    trials: int = 0
    interval: int = FIRST
    due: int | None = None
    """Round count at which the next trial begins."""
    ends: int | None = None
    """Round count at which the current trial ends."""

    def count(self, sequences: int) -> None:
        """One sequence begins a round at this load."""
        self.rounds += 1
        if self.due is None:
            self.due = self.rounds + FIRST * sequences

    @property
    def is_over(self) -> bool:
        """True once the current trial has reached its length."""
        return self.ends is not None and self.rounds >= self.ends

    @property
    def is_due(self) -> bool:
        """True when a trial may begin."""
        return self.ends is None and self.due is not None and self.rounds >= self.due

    def begin(self, best: int, goodput: Sequence[float], sequences: int) -> int | None:
        """The K to try; None if no trial is worthwhile now, which counts as a trial."""
        self.trials += 1
        k = self._candidate(best, goodput)
        if self.trials <= 2 or self.interval == LONGEST or goodput[k] >= WORTH_TRYING * max(goodput):
            self.ends = self.rounds + TRIAL * sequences
            return k
        self._plan(sequences, changed=False)
        return None

    def end(self, sequences: int, *, changed: bool) -> None:
        """The current trial ends; `changed` is True if it changed whether drafting is best."""
        self.ends = None
        self._plan(sequences, changed=changed)

    def _plan(self, sequences: int, *, changed: bool) -> None:
        soon = changed or self.trials < EARLY_TRIALS
        self.interval = SHORTEST if soon else min(2 * self.interval, LONGEST)
        self.due = self.rounds + self.interval * sequences

    def _candidate(self, best: int, goodput: Sequence[float]) -> int:
        most = len(goodput) - 1
        if not best:
            drafted = max(range(1, most + 1), key=goodput.__getitem__)
            return drafted if self.trials > 1 else min(FIRST_DRAFT, most)
        if self.trials % 2 == 0:
            return min(best + NEIGHBOUR, most) if best < most else max(best - NEIGHBOUR, 1)
        return 0
