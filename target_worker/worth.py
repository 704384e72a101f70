"""Whether what is computed ahead makes rounds shorter here: tried with it and without, by turns. Pure.

A target that computes while it waits does so for nothing where the draft shares its memory or its core, and
gets slower by as much. How many tokens a round makes does not depend on it, so times tell.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

TRIED: Final = 96
"""Rounds of a trial, with it and without by turns: what others measure meanwhile is of both. Only these
count, for later the machine may be faster or slower."""
STAYS: Final = 384
"""Rounds after a trial that have what was found better."""
COMPARED: Final = TRIED
"""Rounds of either kind: those of two trials."""
LEAST: Final = 0.97
"""Without it rounds are to be this much shorter at least: times vary by a third, and few are compared."""
STRAY: Final = 3.0
"""A time so many times the median counts as that much: a pause says nothing of the next round."""


def _kept() -> dict[bool, deque[float]]:
    return {True: deque(maxlen=COMPARED), False: deque(maxlen=COMPARED)}


@dataclass(slots=True)
class Worth:
    """Told of every round how long it took; says whether the next ones are to have it.

    Sequences that share a pass have it alike: all of them wait for those of them that have it.
    """

    has_it: bool = True
    """What rounds are to have after the verdicts that are going out."""
    _rounds: int = 0
    _turns: int = 0
    _seconds: dict[bool, deque[float]] = field(default_factory=_kept)

    def observe(self, had_it: bool, seconds: float) -> None:
        """A round took so long, from the verdict before it to its own."""
        if self._rounds % (TRIED + STAYS) < TRIED:
            self._seconds[had_it].append(seconds)
        self._rounds += 1
        if self._rounds % (TRIED + STAYS) == TRIED:
            self.has_it = self._is_better

    def turn(self) -> None:
        """Those that share passes have had a verdict each. They have it for two rounds, then for two not."""
        if self._rounds % (TRIED + STAYS) < TRIED:
            self._turns += 1
            self.has_it = self._turns % 4 < 2

    @property
    def _is_better(self) -> bool:
        with_it, without = self._seconds[True], self._seconds[False]
        if not with_it or not without:
            return self.has_it  # the rounds of one pass may be a whole trial, all of one kind
        return _mean(without) >= LEAST * _mean(with_it)


def _mean(seconds: Collection[float]) -> float:
    most = STRAY * statistics.median(seconds)
    return statistics.fmean(min(value, most) for value in seconds)
