"""When the next pass begins: at once, or when sequences that are about to be back are there. Pure.

A pass has a cost that does not depend on how many share it: reading the weights. Sequences whose rounds
come back while a pass runs miss it, and so does whoever is in that pass miss the next one: two groups take
turns, and each waits for the other's passes. With one pass for all, a round takes the step once and the
way to the coordinator and back; with two groups, the step twice:

    together  return + step + rows      apart  2 step + rows

So sequences are waited for whose usual return is below the step. What drafts for longer, or is on a
device whose step is short, is not: while it is away another group's pass is of more use than a larger one.

A sequence that drafts returns later than one that does not, and mostly does what it did the last time. So
both are kept apart: sequences that stop drafting share passes from their second plain round on, not when a
mean of both has followed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.linear_fit import Line, Moments

WORTH = 1.1
"""Times as long as together must a round take apart: times vary, and one that is late delays all others."""
LATE = 2.0
"""Mean deviations by which a sequence may be later than usual and is still waited for."""
SHARE = 1 / 8
"""Of a new measurement in what is usual."""
MANY = 16
"""Passes of a size that say as much of it as can be said."""
STALL = 3.0
"""A time so many times the usual one says no more than that: a pause of the client or of the machine."""


@dataclass(slots=True)
class Usual:
    """Mean and mean deviation of times in seconds; what is new counts for a fixed share."""

    mean: float
    deviation: float = 0.0
    weight: int = 1

    def observe(self, seconds: float) -> None:
        """Take in one more."""
        self.weight = min(self.weight + 1, MANY)
        share = max(SHARE, 1 / self.weight)
        off = (min(seconds, STALL * self.mean) if self.mean else seconds) - self.mean
        self.deviation += share * (abs(off) - self.deviation)
        self.mean += share * off


@dataclass(slots=True)
class PassCost:
    """Seconds of a pass over its rows: a step, and something for each row."""

    _sizes: dict[int, tuple[Usual, Usual]] = field(default_factory=dict)
    """Rows and seconds of the passes of about one size, doubling from one to the next."""
    _line: tuple[float, float] | None = None

    def observe(self, rows: int, seconds: float) -> None:
        """A pass is over."""
        size = rows.bit_length()
        if size in self._sizes:
            mean_rows, mean_seconds = self._sizes[size]
            mean_rows.observe(rows)
            mean_seconds.observe(seconds)
        else:
            self._sizes[size] = Usual(rows), Usual(seconds)
        self._line = None

    def line(self) -> tuple[float, float]:
        """(seconds of a step, seconds of a row), both 0 while passes of one size only are known."""
        if self._line is None:
            self._line = self._fitted()
        return self._line

    def _fitted(self) -> tuple[float, float]:
        points = [(rows.weight, rows.mean, seconds.mean) for rows, seconds in self._sizes.values()]
        if len(points) < 2:
            return 0.0, 0.0
        moments = Moments.of(points)
        assert moments.slope is not None, "sizes differ"
        line = Line.through(moments.amount, moments.seconds, moments.slope)
        return line.intercept, line.slope


@dataclass(slots=True)
class _Away:
    """A sequence between a verdict and its next round."""

    since: float
    rows: int
    """Of its last round."""


@dataclass(slots=True)
class Gathering:
    """What a target worker knows of the way its sequences take from a verdict to their next round."""

    cost: PassCost = field(default_factory=PassCost)
    _away: dict[str, _Away] = field(default_factory=dict)
    _returns: dict[str, dict[bool, Usual]] = field(default_factory=dict)
    """By sequence, with draft tokens and without."""

    def answered(self, sequence_id: str, rows: int, now: float) -> None:
        """A verdict is out, and the sequence's next round is not here yet."""
        self._away[sequence_id] = _Away(now, rows)

    def back(self, sequence_id: str, rows: int, now: float) -> None:
        """Its next round is here, of so many rows."""
        away = self._away.pop(sequence_id, None)
        if away is None:
            return
        seconds = max(now - away.since, 0.0)
        usual = self._returns.setdefault(sequence_id, {})
        if (drafted := _drafted(rows)) in usual:
            usual[drafted].observe(seconds)
        else:
            usual[drafted] = Usual(seconds)

    def gone(self, sequence_id: str) -> None:
        """It is over."""
        self._away.pop(sequence_id, None)
        self._returns.pop(sequence_id, None)

    def batching_delay(self, rows: int, now: float) -> float:
        """Seconds that a pass over so many rows may wait for others, if none of them comes earlier."""
        step, row = self.cost.line()
        if not step or not self._away:
            return 0.0
        due = [
            (usual.mean, away.since + usual.mean + LATE * usual.deviation - now, away.rows)
            for sequence_id, away in self._away.items()
            if (usual := self._returns.get(sequence_id, {}).get(_drafted(away.rows))) is not None
        ]
        # The quickest first: with each the pass becomes longer, and what gathering gains a smaller share.
        due.sort()
        wait = 0.0
        for usual_return, left, more in due:
            if left <= 0:
                continue
            rows += more
            if 2 * step + row * rows < WORTH * (usual_return + step + row * rows):
                break
            wait = max(wait, left)
        return wait


def _drafted(rows: int) -> bool:
    """A round of so many rows has draft tokens; so, it is taken, has the next one."""
    return rows > 1
