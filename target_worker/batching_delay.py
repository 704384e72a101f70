"""How long the next pass waits for sequences that are about to return. Pure.

A pass has a cost that does not depend on the number of its rows, the step: reading the weights. A sequence
whose round arrives while a pass runs misses that pass, and those in the pass miss the next one. So two groups
take turns, and each waits for the other's passes. With one pass for all, a round takes the step once, and the
way to the coordinator and back; with two groups it takes the step twice:

    together  return + step + rows      apart  2 step + rows

So the pass waits for sequences whose usual return is shorter than the step. It does not wait for those that
draft for longer, or on a device whose step is short: another group's pass meanwhile is of more use than a
larger pass.

A sequence that drafts returns later than one that does not, and mostly repeats what it did last. So both
times are kept apart: sequences that stop drafting share passes from their second plain round on, not when a
mean of both has followed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.linear_fit import Line, Moments

WORTH = 1.1
"""A round apart must take this many times as long as together: times vary, and a late sequence delays all."""
LATE = 2.0
"""A sequence is waited for until it is this many mean deviations later than usual."""
SHARE = 1 / 8
"""Weight of a new measurement in the mean."""
MANY = 16
"""The most measurements that a mean counts for."""
STALL = 3.0
"""A time is clipped at this many times the usual one: the client or the machine paused."""


@dataclass(slots=True)
class Usual:
    """Moving mean and mean deviation of times in seconds."""

    mean: float
    deviation: float = 0.0
    weight: int = 1

    def observe(self, seconds: float) -> None:
        """Add a measurement."""
        self.weight = min(self.weight + 1, MANY)
        share = max(SHARE, 1 / self.weight)
        off = (min(seconds, STALL * self.mean) if self.mean else seconds) - self.mean
        self.deviation += share * (abs(off) - self.deviation)
        self.mean += share * off


@dataclass(slots=True)
class PassCost:
    """Seconds of a pass as a line over its rows: a step, and a time for each row."""

    _sizes: dict[int, tuple[Usual, Usual]] = field(default_factory=dict)
    """Rows and seconds of passes, by bucket: each bucket covers sizes up to twice those of the one before."""
    _line: tuple[float, float] | None = None

    def observe(self, rows: int, seconds: float) -> None:
        """Add a pass."""
        size = rows.bit_length()
        if size in self._sizes:
            mean_rows, mean_seconds = self._sizes[size]
            mean_rows.observe(rows)
            mean_seconds.observe(seconds)
        else:
            self._sizes[size] = Usual(rows), Usual(seconds)
        self._line = None

    def line(self) -> tuple[float, float]:
        """(seconds of a step, seconds of a row), both 0 until passes of two sizes are known."""
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
class BatchingDelay:
    """How long each sequence takes from a verdict to its next round, and which of them a pass waits for."""

    cost: PassCost = field(default_factory=PassCost)
    _away: dict[str, _Away] = field(default_factory=dict)
    _returns: dict[str, dict[bool, Usual]] = field(default_factory=dict)
    """By sequence; then by whether the round has draft tokens."""

    def answered(self, sequence_id: str, rows: int, now: float) -> None:
        """A verdict is sent, and the sequence's next round is not here yet."""
        self._away[sequence_id] = _Away(now, rows)

    def back(self, sequence_id: str, rows: int, now: float) -> None:
        """The sequence's next round is here, with so many rows."""
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
        """The sequence ended."""
        self._away.pop(sequence_id, None)
        self._returns.pop(sequence_id, None)

    def seconds(self, rows: int, now: float) -> float:
        """The most seconds that a pass of so many rows waits for other sequences."""
        step, row = self.cost.line()
        if not step or not self._away:
            return 0.0
        due = [
            (usual.mean, away.since + usual.mean + LATE * usual.deviation - now, away.rows)
            for sequence_id, away in self._away.items()
            if (usual := self._returns.get(sequence_id, {}).get(_drafted(away.rows))) is not None
        ]
        # The quickest first: each one makes the pass longer, and the gain a smaller share of it.
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
    """True when a round of so many rows has draft tokens; the next one is assumed to be alike."""
    return rows > 1
