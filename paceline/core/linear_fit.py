"""Linear fits of measured times: a fixed cost plus a cost per unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Line:
    """seconds = intercept + slope * amount."""

    intercept: float
    slope: float

    @classmethod
    def through(cls, amount: float, seconds: float, slope: float) -> Line:
        """The line through a point, with the slope bounded so that slope and intercept are not negative."""
        slope = max(min(slope, seconds / amount if amount > 0 else slope), 0.0)
        return cls(seconds - slope * amount, slope)


@dataclass(frozen=True, slots=True)
class Moments:
    """Weighted means of measurements and their least-squares slope."""

    amount: float
    seconds: float
    slope: float | None
    """None if the amounts hardly differ."""

    @classmethod
    def of(cls, points: Sequence[tuple[float, float, float]], least_variance: float = 0.0) -> Moments:
        """`points` has at least one (weight, amount, seconds). A variance of the amounts up to
        `least_variance` gives no slope."""
        total = sum(w for w, _, _ in points)
        x = sum(w * a for w, a, _ in points) / total
        y = sum(w * s for w, _, s in points) / total
        spread = sum(w * (a - x) ** 2 for w, a, _ in points)
        if spread <= least_variance * total:
            return cls(x, y, None)
        return cls(x, y, sum(w * (a - x) * (s - y) for w, a, s in points) / spread)
