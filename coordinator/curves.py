"""Seconds over draft tokens: means around whole numbers of them, and a line through these. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.lines import Line, Moments

MEMORY = 80.0
"""Measurements after which an old one has lost its say."""
TRUST = 16.0
"""Measurements at one K that count as much as the line through all with draft tokens."""
LEAST_SPREAD = 0.02
"""Variance of the draft tokens below which nothing can be said of their cost."""
ALMOST_NONE = 0.05
"""Draft tokens a sequence up to which decoding is plain: one that drafts splits a pass of many."""
FADED = 40.0
"""Measurements that all the old ones count for when new ones are on their way: a trial lasts for some tenths
of a second, in which a machine that others use too is a fifth faster or slower than in the next ones."""
KNOWN = 4.0
"""Measurements from which on a mean can tell something."""


@dataclass(slots=True)
class Cell:
    """Mean of the measurements around one whole number of draft tokens."""

    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    def observe(self, tokens: float, seconds: float, weight: float, outlier: float = math.inf) -> None:
        """Take in one measurement; a time `outlier` times the mean counts as that much."""
        if self.weight >= 1 and self.seconds > 0:
            seconds = min(seconds, outlier * self.seconds)
        share = self._count(tokens, weight)
        self.seconds += share * (seconds - self.seconds)

    def correct(self, tokens: float, error: float, weight: float) -> None:
        """Take in one that lasted longer than the mean by a share of it, or less long."""
        self.seconds *= math.exp(self._count(tokens, weight) * error)

    def _count(self, tokens: float, weight: float) -> float:
        """The measurement's share in the means."""
        self.weight = min(self.weight + weight, MEMORY)
        share = weight / self.weight
        self.tokens += share * (tokens - self.tokens)
        return share


@dataclass(frozen=True, slots=True)
class Shape:
    """What is taken without draft tokens, and with them.

    These are apart: plain rounds follow one another on the target and share each pass, while a round with
    draft tokens waits for its proposal, for messages, and for passes of others.
    """

    line: Line
    """From one draft token on."""
    plain: float
    """Seconds."""
    guessed: bool = False
    """Nothing was measured with draft tokens."""

    def times(self, factor: float) -> Shape:
        """So many times as long."""
        return Shape(self.line.times(factor), factor * self.plain, self.guessed)

    def among(self, times: float, least: float = 0.0) -> Shape:
        """Where so many times the sequences run: each draft token of all is that many times the rows.

        It adds `least` seconds at least. A guess is not made worse by any of that.
        """
        if self.guessed:
            return self
        # Draft tokens never take less time than none. Where they seem to, chance is not to be multiplied.
        beyond = self.line.intercept - self.plain
        intercept = self.plain + max(times * beyond, min(beyond, 0.0))
        return Shape(Line(intercept, max(times * self.line.slope, least)), self.plain)


@dataclass(slots=True)
class Curve:
    """Seconds over draft tokens a sequence, from measurements and a line through them."""

    growth: float
    """Share of the seconds without draft tokens that one draft token adds, while nothing better is known."""
    outlier: float
    """A time this many times the mean counts as that much: one stall says nothing of the next round."""
    of_rows: bool = False
    """What draft tokens add at another load is the same seconds here; else the same share of the whole."""
    cells: dict[int, Cell] = field(default_factory=dict)
    _moments: Moments | None = None
    """Of the cells as they are; None after a change."""

    def observe(self, tokens: float, seconds: float, weight: float = 1.0) -> None:
        """Take in one measurement; `weight` below 1 where several tell of the same pass."""
        self.cells.setdefault(_place(tokens), Cell()).observe(tokens, seconds, weight, self.outlier)
        self._moments = None

    def correct(self, tokens: float, error: float, weight: float) -> None:
        """Take in one measurement by what it differs from the mean, as a share of that; the mean is known."""
        self.cells[_place(tokens)].correct(tokens, error, weight)
        self._moments = None

    def usual(self, tokens: float) -> Cell | None:
        """Mean around so many draft tokens; None while that is not known."""
        cell = self.cells.get(_place(tokens))
        return cell if cell is not None and cell.weight >= KNOWN and cell.seconds > 0 else None

    def fade(self, tokens: int) -> None:
        """Let what is known of so many draft tokens count for less: it is about to be measured again."""
        if tokens in self.cells:
            self.cells[tokens].weight = min(self.cells[tokens].weight, FADED)
            self._moments = None

    def shape(self, like: Shape | None = None, slope: float = 0.0) -> Shape | None:
        """A line through the cells with draft tokens (least squares), and the one without; `like` if none.

        With one cell the line has the slope of `like`, else `slope` (seconds a draft token, where something
        else tells that), at least that of `growth`; with that without draft tokens alone it is that of `like`
        as well.
        """
        if not self.cells:
            return like
        plain, line = self.cells.get(0), self._line(like, slope)
        if plain is not None:
            return Shape(line, plain.seconds, self.cells.keys() == {0} and (like is None or like.guessed))
        if like is not None and like.line.at(1) > 0:
            return Shape(line, like.plain * line.at(1) / like.line.at(1))
        return Shape(line, line.at(0))

    def _line(self, like: Shape | None, slope: float) -> Line:
        # Most loads change seldom, and all of them are asked every time.
        if self._moments is None:
            cells = [c for place, c in self.cells.items() if place] or self.cells.values()
            self._moments = Moments.of([(c.weight, c.tokens, c.seconds) for c in cells], LEAST_SPREAD)
        x, y = self._moments.amount, self._moments.seconds
        if self._moments.slope is not None:
            return Line.through(x, y, self._moments.slope)
        if self.of_rows and like is not None and like.guessed:
            like = None
        if self.of_rows and like is not None:
            if self.cells.keys() == {0}:
                return Line(y + like.line.intercept - like.plain, like.line.slope)
            return Line.through(x, y, min(like.line.slope, _of_each_row(x, y)))
        if like is not None and self.cells.keys() == {0} and like.plain > 0:
            return like.line.times(y / like.plain)
        if like is not None and like.line.at(x) > 0:
            return Line.through(x, y, y * like.line.slope / like.line.at(x))
        least = y * self.growth / (1 + self.growth * x)
        return Line.through(x, y, max(least, min(slope, _of_each_row(x, y))))

    def seconds(self, most: int, like: Shape | None = None, slope: float = 0.0) -> list[float] | None:
        """Seconds for 0 to `most` draft tokens; None when nothing is known."""
        shape = self.shape(like, slope)
        if shape is None:
            return None
        line, result = shape.line, []
        for k in range(1, most + 1):
            cell, guess = self.cells.get(k), line.at(k)
            if cell is not None:
                own = max(0.0, cell.seconds + line.slope * (k - cell.tokens))
                guess = (cell.weight * own + TRUST * guess) / (cell.weight + TRUST)
            result.append(guess)
        return [shape.plain, *rising(result)]


def _of_each_row(tokens: float, seconds: float) -> float:
    """What one of them takes of a pass that takes nothing else: no draft token adds more."""
    return seconds / (1 + tokens)


def _place(tokens: float) -> int:
    """The cell of so many draft tokens."""
    return 0 if tokens < ALMOST_NONE else max(1, round(tokens))


def rising(values: Sequence[float]) -> list[float]:
    """The nearest values (least squares) that never fall: drafting more never takes less time."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            other, others = pools.pop()
            mean, count = (mean * count + other * others) / (count + others), count + others
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]
