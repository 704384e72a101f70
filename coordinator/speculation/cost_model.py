"""Seconds of a round for each K, measured separately for each load. Pure.

A load is a power-of-two bracket of the number of sequences. For each load, the model keeps the mean of plain
rounds, and a mean for each K of drafted rounds. A line in K, shrunk towards a prior slope, joins those means.
A load without measurements takes the nearest load's values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

COST_MEMORY = 60.0
"""Number of measurements that a mean remembers, per square root of the sequences in the pass, because
measurements of one pass are alike."""
SHARED_PASS = 8
"""Number of sequences above which the memory grows no further."""
OUTLIER = 3.0
"""A measurement counts as at most this multiple of the mean, once a mean has `FEW` measurements."""
FEW = 4.0
SLOPE_WEIGHT = 8.0
"""Weight, in measurements, of the prior slope in the line, and of the line in each K's own mean."""
MAX_WEIGHT = 40.0
"""Upper bound of a K's weight in the line, in measurements."""
PRIOR_SLOPE = 0.08
"""Share that one more draft token adds to a drafted round, until measured."""
PRIOR_OVERHEAD = 0.15
"""Share that each draft token adds to a plain round, until any drafted round is measured."""
LEAST_SHARE = 0.3
"""A plain round without measurements takes at least this share of the mean drafted round."""


@dataclass(slots=True)
class Mean:
    """A mean with exponentially fading weights."""

    weight: float = 0.0
    value: float = 0.0

    def add(self, seconds: float, memory: float) -> None:
        """Add one measurement."""
        if self.weight >= FEW:
            seconds = min(seconds, OUTLIER * self.value)
        self.weight = min(self.weight + 1, memory)
        self.value += (seconds - self.value) / self.weight


@dataclass(slots=True)
class RoundCosts:
    """Seconds by K at one load."""

    means: dict[int, Mean] = field(default_factory=dict)

    def add(self, num_draft: int, seconds: float, sequences: int) -> None:
        """Learn from one round with `num_draft` draft tokens among `sequences` sequences."""
        memory = COST_MEMORY * min(max(sequences, 1), SHARED_PASS) ** 0.5
        self.means.setdefault(num_draft, Mean()).add(seconds, memory)

    def seconds(self, most: int, shape: Sequence[float] | None = None) -> list[float] | None:
        """Seconds of a round with 0 to `most` draft tokens; None without measurements.

        `shape` has another load's seconds, whose proportions replace drafted rounds that were not measured
        here.
        """
        plain = self.means.get(0)
        drafted = [(min(m.weight, MAX_WEIGHT), k, m.value) for k, m in self.means.items() if k]
        if not drafted:
            if plain is None:
                return None
            if shape is not None:
                return [plain.value * seconds / shape[0] for seconds in shape]
            return [plain.value * (1 + PRIOR_OVERHEAD * k) for k in range(most + 1)]
        line = _line(drafted, most)
        centre = sum(w * s for w, _, s in drafted) / sum(w for w, _, _ in drafted)
        result = [plain.value if plain is not None else max(line[0], LEAST_SHARE * centre)]
        for k in range(1, most + 1):
            mean = self.means.get(k)
            seconds = line[k]
            if mean is not None:
                seconds = (mean.weight * mean.value + SLOPE_WEIGHT * seconds) / (mean.weight + SLOPE_WEIGHT)
            # More draft tokens never take less time. A plain round may take longer than one with a draft
            # token.
            result.append(max(seconds, result[-1]) if k > 1 else seconds)
        return result


def _line(points: Sequence[tuple[float, int, float]], most: int) -> list[float]:
    """Least squares over (weight, K, seconds); the slope is shrunk towards the prior, and not negative."""
    total = sum(w for w, _, _ in points)
    k_mean = sum(w * k for w, k, _ in points) / total
    mean = sum(w * s for w, _, s in points) / total
    spread = sum(w * (k - k_mean) ** 2 for w, k, _ in points)
    covariance = sum(w * (k - k_mean) * (s - mean) for w, k, s in points)
    slope = (covariance + SLOPE_WEIGHT * PRIOR_SLOPE * mean) / (spread + SLOPE_WEIGHT)
    return [max(mean + max(slope, 0.0) * (k - k_mean), 1e-9) for k in range(most + 1)]


def bracket(sequences: int) -> int:
    """The bracket of a number of sequences: 1, 2, 3 to 4, 5 to 8, … are 0, 1, 2, 3, …"""
    return (max(sequences, 1) - 1).bit_length()


@dataclass(slots=True)
class CostModel:
    """Costs of whole rounds and of verifications, by load."""

    most: int
    """The largest K."""
    rounds: dict[int, RoundCosts] = field(default_factory=dict)
    """From one verdict to the next, including the wait for the proposal."""
    verifications: dict[int, RoundCosts] = field(default_factory=dict)
    """From sending a proposal to its verdict: the cost of a proposal that causes no wait."""

    def add(self, num_draft: int, drafting: float, verifying: float, sequences: int) -> None:
        """Learn from one round that waited `drafting` seconds for its proposal and `verifying` for its
        verdict."""
        costs = self.rounds.setdefault(bracket(sequences), RoundCosts())
        costs.add(num_draft, drafting + verifying, sequences)
        self.add_verification(num_draft, verifying, sequences)

    def add_verification(self, num_draft: int, seconds: float, sequences: int) -> None:
        """Learn from one verification alone."""
        self.verifications.setdefault(bracket(sequences), RoundCosts()).add(num_draft, seconds, sequences)

    def round_seconds(self, load: int) -> list[float] | None:
        """Seconds of a round with 0 to `most` draft tokens; None while no load was measured."""
        return self._seconds(self.rounds, load)

    def verify_seconds(self, load: int) -> list[float] | None:
        """The same without the wait for a proposal."""
        return self._seconds(self.verifications, load)

    def _seconds(self, costs: dict[int, RoundCosts], load: int) -> list[float] | None:
        near = sorted((other for other in costs if costs[other].means), key=lambda other: abs(other - load))
        if not near:
            return None
        nearest, shape = costs[near[0]], None
        if not any(nearest.means):
            # Only plain rounds were measured.
            whole = (
                costs[other] for other in near if 0 in costs[other].means and len(costs[other].means) > 1
            )
            shape = next((each.seconds(self.most) for each in whole), None)
        return nearest.seconds(self.most, shape)
