"""Seconds of a round for each arm, measured separately for each load. Pure.

A load is a power-of-two bracket of the number of sequences. For each load, the model keeps the mean of plain
rounds, and a mean for each arm of drafted rounds. A line in K, shrunk towards a prior slope, joins those of
chains. A tree costs what the chain of its depth costs, and as much for each further node: until trees were
measured, what one more row costs a verification. A load without measurements takes the nearest load's values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.speculation.arms import PLAIN, DraftArm, DraftArms

COST_MEMORY = 60.0
"""Number of measurements that a mean remembers, per square root of the sequences in the pass, because
measurements of one pass are alike."""
SHARED_PASS = 8
"""Number of sequences above which the memory grows no further."""
OUTLIER = 3.0
"""A measurement counts as at most this multiple of the mean, once a mean has `FEW` measurements."""
FEW = 4.0
SLOPE_WEIGHT = 8.0
"""Weight, in measurements, of the prior slope in a line, and of the line in each arm's own mean."""
MAX_WEIGHT = 40.0
"""Upper bound of an arm's weight in the line, in measurements."""
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
    """Seconds by arm at one load."""

    means: dict[DraftArm, Mean] = field(default_factory=dict)

    def add(self, arm: DraftArm, seconds: float, sequences: int) -> None:
        """Learn from one round with this arm among `sequences` sequences."""
        memory = COST_MEMORY * min(max(sequences, 1), SHARED_PASS) ** 0.5
        self.means.setdefault(arm, Mean()).add(seconds, memory)

    def seconds(self, arms: DraftArms, row: float = 0.0, shape: Sequence[float] | None = None) -> list[float]:
        """Seconds of a round by arm. Requires a measurement.

        `row` is what a tree's node beyond its depth adds, until trees were measured. `shape` has another
        load's seconds, whose proportions replace drafted rounds that were not measured here.
        """
        plain = self.means.get(PLAIN)
        drafted = [(min(m.weight, MAX_WEIGHT), arm, m.value) for arm, m in self.means.items() if arm.depth]
        if not drafted:
            assert plain is not None
            proportions = shape or [1 + PRIOR_OVERHEAD * arm.rows for arm in arms.each]
            return [plain.value * each / proportions[0] for each in proportions]
        chains = [(weight, arm.depth, seconds) for weight, arm, seconds in drafted if not arm.nodes]
        line = _line(chains or [(w, arm.depth, s) for w, arm, s in drafted], arms.max_draft)
        centre = sum(w * s for w, _, s in drafted) / sum(w for w, _, _ in drafted)
        result = [plain.value if plain is not None else max(line[0], LEAST_SHARE * centre)]
        for k in arms.chains:
            seconds = self._shrunk(DraftArm(k), line[k])
            # More draft tokens never take less time. A plain round may take longer than one with a draft
            # token.
            result.append(max(seconds, result[-1]) if k > 1 else seconds)
        trees = [
            (w, arm.more, s - result[min(arm.depth, arms.max_draft)]) for w, arm, s in drafted if arm.nodes
        ]
        weight = sum(w * more**2 for w, more, _ in trees) + SLOPE_WEIGHT
        row = max(sum(w * more * s for w, more, s in trees) + SLOPE_WEIGHT * row, 0.0) / weight
        for tree in arms.each[arms.trees.start :]:
            result.append(self._shrunk(tree, result[tree.depth] + row * tree.more))
        return result

    def _shrunk(self, arm: DraftArm, prior: float) -> float:
        mean = self.means.get(arm)
        if mean is None:
            return prior
        return (mean.weight * mean.value + SLOPE_WEIGHT * prior) / (mean.weight + SLOPE_WEIGHT)


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

    arms: DraftArms
    rounds: dict[int, RoundCosts] = field(default_factory=dict)
    """From one verdict to the next, including the wait for the proposal."""
    verifications: dict[int, RoundCosts] = field(default_factory=dict)
    """From sending a proposal to its verdict: the cost of a proposal that causes no wait. The shape of its
    draft tokens does not matter; they count as a chain."""
    _chains: DraftArms = field(init=False)

    def __post_init__(self) -> None:
        self._chains = DraftArms(self.arms.max_draft)

    def add(self, arm: DraftArm, drafting: float, verifying: float, sequences: int) -> None:
        """Learn from one round that waited `drafting` seconds for its proposal and `verifying` for its
        verdict."""
        costs = self.rounds.setdefault(bracket(sequences), RoundCosts())
        costs.add(arm, drafting + verifying, sequences)
        self.add_verification(arm.rows, verifying, sequences)

    def add_verification(self, num_draft: int, seconds: float, sequences: int) -> None:
        """Learn from one verification alone."""
        costs = self.verifications.setdefault(bracket(sequences), RoundCosts())
        costs.add(DraftArm(num_draft), seconds, sequences)

    def round_seconds(self, load: int) -> list[float] | None:
        """Seconds of a round by arm; None while no load was measured."""
        verifying = self.verify_seconds(load)
        row = (verifying[-1] - verifying[1]) / (len(verifying) - 2) if verifying and verifying[2:] else 0.0
        return self._seconds(self.rounds, load, self.arms, row)

    def verify_seconds(self, load: int) -> list[float] | None:
        """Seconds of a verification of 0 to the largest K draft tokens; None while no load was measured."""
        return self._seconds(self.verifications, load, self._chains)

    @staticmethod
    def _seconds(
        costs: dict[int, RoundCosts], load: int, arms: DraftArms, row: float = 0.0
    ) -> list[float] | None:
        near = sorted(costs, key=lambda other: abs(other - load))
        if not near:
            return None
        nearest, shape = costs[near[0]], None
        if nearest.means.keys() == {PLAIN}:
            whole = (
                costs[other] for other in near if PLAIN in costs[other].means and len(costs[other].means) > 1
            )
            shape = next((each.seconds(arms, row) for each in whole), None)
        return nearest.seconds(arms, row, shape)
