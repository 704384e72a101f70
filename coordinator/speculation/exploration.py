"""Decides when another arm is tried, and for how long. Pure; time is counted in rounds.

An arm that never runs is never measured, so at each load a few rounds are spent on another one at doubling
intervals. Trials take turns: the best arm of each other regime (plain rounds, chains, trees) and, while
drafting is best, a neighbour in its own regime, which measures the slope of the costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SETTLING_ROUNDS = 4
"""Rounds of each sequence after a change of arm that are not measured, because passes with both overlap."""
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
"""An arm is not tried if its expected goodput is below this share of the best one's. The first two trials and
those at the longest interval are exempt."""
FIRST_DRAFT = 2
"""K of a load's first trial of drafting."""
DISTANCES = (1, 2)
"""From the best arm to a neighbour, in turns: of a tree another depth, and another size."""


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

    def begin(
        self, best: int, goodput: Sequence[float], regimes: Sequence[range], sequences: int
    ) -> int | None:
        """The arm to try; None if no trial is worthwhile now, which counts as a trial.

        `regimes` has the numbers of the arms in use, by regime, plain rounds first.
        """
        self.trials += 1
        arm = self._candidate(best, goodput, regimes)
        if self.trials <= 2 or self.interval == LONGEST or goodput[arm] >= WORTH_TRYING * max(goodput):
            self.ends = self.rounds + TRIAL * sequences
            return arm
        self._plan(sequences, changed=False)
        return None

    def end(self, sequences: int, *, changed: bool) -> None:
        """The current trial ends; `changed` is True if it changed the best arm's regime."""
        self.ends = None
        self._plan(sequences, changed=changed)

    def _plan(self, sequences: int, *, changed: bool) -> None:
        soon = changed or self.trials < EARLY_TRIALS
        self.interval = SHORTEST if soon else min(2 * self.interval, LONGEST)
        self.due = self.rounds + self.interval * sequences

    def _candidate(self, best: int, goodput: Sequence[float], regimes: Sequence[range]) -> int:
        if not best and self.trials == 1:
            return min(FIRST_DRAFT, len(regimes[1])) + regimes[1].start - 1
        own = next(regime for regime in regimes if best in regime)
        others = [max(regime, key=goodput.__getitem__) for regime in regimes if regime is not own]
        if not best:
            return others[self.trials % len(others)]
        turn, number = divmod(self.trials, 1 + len(others))
        if number:
            return others[number - 1]
        distance = DISTANCES[turn % 2]
        return min(best + distance, own[-1]) if best < own[-1] else max(best - distance, own[0])
