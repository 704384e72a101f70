"""The expected gain of speculation for given α, c and K: the computation of `paceline plan`.

All formulas are those of `paceline.decoding.theory` (Leviathan et al. 2023, section 3).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.decoding import theory


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One choice of K."""

    k: int
    expected_tokens: float
    """Tokens per round, the next token included."""
    speedup: float
    """Over plain decoding (theorem 3.8)."""
    speedup_hidden: float
    """Speed-up if lookahead hides all drafting: c = 0."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All choices of K up to a bound, and the best."""

    alpha: float
    c: float
    overhead: float
    row_cost: float
    k: int
    speedup: float
    expected_tokens: float
    best_k: int
    best_speedup: float
    improvement_possible: bool
    """α > c (corollary 3.9, which ignores overhead)."""
    oracle_bound: float | None
    """Speed-up of free drafts of exactly the accepted length; None if infinite."""
    rows: tuple[PlanRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """A dictionary for JSON."""
        return asdict(self)


def make_plan(
    alpha: float,
    c: float,
    k: int,
    *,
    max_k: int = limits.MAX_SPECULATIVE_TOKENS,
    overhead: float = 0.0,
    row_cost: float = 0.0,
) -> Plan:
    """The plan for an acceptance rate and a cost ratio. Raises InvalidArgumentError naming the field.

    Args:
        alpha: acceptance rate of one draft token.
        c: time per draft token over the target's step.
        k: number of draft tokens per round.
        max_k: largest K to consider.
        overhead: wire and queue time of a round over the target's step; plain decoding has none.
        row_cost: extra time of each row beyond the first over the target's step.
    """
    _check(0 <= alpha <= 1, "alpha", f"must be in [0, 1], got {alpha}")
    for name, value in (("c", c), ("overhead", overhead), ("row_cost", row_cost)):
        _check(math.isfinite(value) and value >= 0, name, f"must be a number of at least 0, got {value}")
    _check(1 <= max_k <= limits.MAX_SPECULATIVE_TOKENS, "max_k", f"must be in [1, 32], got {max_k}")
    _check(0 <= k <= max_k, "k", f"must be in [0, {max_k}], got {k}")

    def gain(cost: float, tokens: int) -> float:
        if tokens == 0:
            return 1.0
        return theory.speedup(alpha, cost, tokens, overhead=overhead, row_cost=row_cost)

    best = theory.best_k(alpha, c, max_k, overhead=overhead, row_cost=row_cost)
    bound = theory.oracle_bound(alpha)
    return Plan(
        alpha=alpha,
        c=c,
        overhead=overhead,
        row_cost=row_cost,
        k=k,
        speedup=gain(c, k),
        expected_tokens=theory.expected_tokens(alpha, k),
        best_k=best,
        best_speedup=gain(c, best),
        improvement_possible=theory.improvement_possible(alpha, c),
        oracle_bound=bound if math.isfinite(bound) else None,
        rows=tuple(
            PlanRow(n, theory.expected_tokens(alpha, n), gain(c, n), gain(0.0, n)) for n in range(max_k + 1)
        ),
    )


def _check(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise InvalidArgumentError(field, message)
