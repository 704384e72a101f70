"""Straight lines through measured times: what is taken whatever is done, and what each more of it takes."""

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
        """More never takes less time, and nothing takes some: a slope that says otherwise is bounded."""
        slope = max(min(slope, seconds / amount if amount > 0 else slope), 0.0)
        return cls(seconds - slope * amount, slope)


@dataclass(frozen=True, slots=True)
class Moments:
    """Of weighted measurements: means, and how the seconds go with the amounts (least squares)."""

    amount: float
    seconds: float
    slope: float | None
    """None where the amounts hardly differ."""

    @classmethod
    def of(cls, points: Sequence[tuple[float, float, float]], least_variance: float = 0.0) -> Moments:
        """Of at least one (weight, amount, seconds); amounts that vary no more than that say nothing."""
        total = sum(w for w, _, _ in points)
        x = sum(w * a for w, a, _ in points) / total
        y = sum(w * s for w, _, s in points) / total
        spread = sum(w * (a - x) ** 2 for w, a, _ in points)
        if spread <= least_variance * total:
            return cls(x, y, None)
        return cls(x, y, sum(w * (a - x) * (s - y) for w, a, s in points) / spread)
