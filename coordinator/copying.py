"""What copies from the text cost a crowd: rounds as they are beside a few without copies, or with more. Pure.

Where many share passes somebody always copies, and no pass shows what all of them would take without. Passes
that are timed do not tell it either: in those all take part and no prompt is read, and copies make others.
So now and then all stop to copy for some rounds, between two stretches in which they do as usual; where
hardly anything is copied they copy more for as long. What counts is how long all rounds last, whatever is in
them. Rounds are the clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from coordinator.costs import SHORTEST, STRAY, Finding

FIRST = 8
"""Rounds of each sequence before the first comparison at a load."""
SETTLE, STRETCH = 3, 9
"""Rounds of each sequence after a change that still tell of the time before, and of a stretch that counts."""
EARLY = 4
"""Comparisons that follow each other soon."""
AGAIN, GROWTH, LAST = 16, 2, 512
"""Rounds of each sequence between two of them: early, how they grow, and at most. Those without copies are
counted apart from those with more: while no text repeats itself, the early ones are not used up."""
LITTLE = 0.05
"""Copied tokens of a round below which nothing can be learned from leaving them out."""


class Copying(Enum):
    """What all do about matches."""

    USUAL = "usual"
    NONE = "none"
    MORE = "more"


@dataclass(slots=True)
class Stretch:
    """Of rounds."""

    rounds: int = 0
    seconds: float = 0.0
    copied: int = 0

    def add(self, seconds: float, copied: int) -> None:
        """One round, verdict to verdict. `STRAY` times as long as those before is all that one counts for."""
        seconds = max(seconds, SHORTEST)
        self.seconds += min(seconds, STRAY * self.length) if self.rounds else seconds
        self.rounds += 1
        self.copied += copied

    @property
    def length(self) -> float:
        """Seconds of a round."""
        return self.seconds / self.rounds

    @property
    def share(self) -> float:
        """Copied tokens of a round."""
        return self.copied / self.rounds


class _Part(Enum):
    """Of a comparison."""

    BETWEEN = "between two of them"
    BEFORE = "all as usual"
    OTHER = "no copies, or more"
    AFTER = "all as usual again"


@dataclass(slots=True)
class Comparison:
    """Of one load, again and again."""

    copying: Copying = Copying.USUAL
    """What is to be done now."""
    _part: _Part = _Part.BETWEEN
    _usual: Stretch = field(default_factory=Stretch)
    _other: Stretch = field(default_factory=Stretch)
    _rounds: int = 0
    _counts_from: int = 0
    _next: int = 0
    """Round with which the present part ends; 0 before the first one."""
    _number: int = 0
    """Of comparisons without copies."""
    _interval: int = AGAIN
    _next_more: int = 0
    """Round from which on one with more may begin."""
    _interval_more: int = AGAIN

    def judged(self, seconds: float, copied: int, size: int) -> Finding | None:
        """Count a round of one of so many sequences; what was found, where a comparison ends with it."""
        self._rounds += 1
        if not self._next:
            self._next = self._rounds + FIRST * size
        if self._part is not _Part.BETWEEN and self._rounds > self._counts_from:
            (self._other if self._part is _Part.OTHER else self._usual).add(seconds, copied)
        return self._step(size) if self._rounds >= self._next else None

    def interrupted(self, size: int) -> None:
        """Something else changes as well, so that nothing can be learned now."""
        if self._part is not _Part.BETWEEN:
            self._wait(size, AGAIN)

    def _step(self, size: int) -> Finding | None:
        match self._part:
            case _Part.BETWEEN:
                self._usual, self._other = Stretch(), Stretch()
                self._begin(_Part.BEFORE, size)
            case _Part.BEFORE if self._usual.share >= LITTLE:
                self.copying = Copying.NONE
                self._begin(_Part.OTHER, size)
            case _Part.BEFORE if self._rounds >= self._next_more:
                self.copying = Copying.MORE
                self._interval_more = min(GROWTH * self._interval_more, LAST)
                self._next_more = self._rounds + self._interval_more * size
                self._begin(_Part.OTHER, size)
            case _Part.BEFORE:
                self._wait(size, AGAIN)
            case _Part.OTHER:
                self.copying = Copying.USUAL
                self._begin(_Part.AFTER, size)
            case _Part.AFTER:
                return self._end(size)
        return None

    def _begin(self, part: _Part, size: int) -> None:
        self._part = part
        self._counts_from = self._rounds + (0 if part is _Part.BEFORE else SETTLE * size)
        self._next = self._counts_from + STRETCH * size

    def _end(self, size: int) -> Finding:
        if self._usual.share >= LITTLE:
            self._number += 1
            if self._number > EARLY:
                self._interval = min(GROWTH * self._interval, LAST)
            self._wait(size, self._interval)
        else:
            self._wait(size, AGAIN)
        less, more = sorted((self._usual, self._other), key=lambda stretch: stretch.share)
        return Finding(more.share - less.share, more.length / less.length - 1)

    def _wait(self, size: int, rounds: int) -> None:
        self.copying, self._part = Copying.USUAL, _Part.BETWEEN
        self._next = self._rounds + rounds * size
