"""The expected gain of speculation for given α, c and K: the computation of `paceline plan`.

All formulas are those of `paceline.decoding.theory` (Leviathan et al. 2023, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
    speedup_with_lookahead: float
    """Upper bound: every proposal is drafted while the target verifies the one before."""
    operations: float
    """Arithmetic operations per token over plain decoding (theorem 3.11)."""
    memory: float
    """Memory read per token over plain decoding (section 3.4)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All choices of K up to a bound, and the best."""

    alpha: float
    c: float
    overhead: float
    row_cost: float
    c_hat: float
    m: float
    k: int
    speedup: float
    expected_tokens: float
    best_k: int
    best_speedup: float
    improvement_possible: bool
    """α > c (corollary 3.9, which ignores overhead)."""
    least_improvement: float | None
    """The speed-up of K = 1 (corollary 3.9, which ignores overhead); None if no improvement is possible."""
    best_k_with_lookahead: int
    best_speedup_with_lookahead: float
    oracle_bound: float | None
    """Speed-up of free drafts of exactly the accepted length; None if infinite."""
    oracle_bound_with_c: float | None
    """The same for drafts of cost c (section 3.5)."""
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
    c_hat: float = 0.0,
    m: float | None = None,
) -> Plan:
    """The plan for an acceptance rate and a cost ratio. Raises InvalidArgumentError naming the field.

    Args:
        alpha: acceptance rate of one draft token.
        c: time per draft token over the target's step.
        k: number of draft tokens per round.
        max_k: largest K to consider.
        overhead: wire and queue time of a round over the target's step; plain decoding has none.
        row_cost: extra time of each row beyond the first over the target's step.
        c_hat: the draft's arithmetic operations per token over the target's.
        m: memory that a draft step reads over that of a target step; None takes `c_hat`.
    """
    memory = c_hat if m is None else m
    _check(0 <= alpha <= 1, "alpha", f"must be in [0, 1], got {alpha}")
    for name, value in (
        ("c", c),
        ("overhead", overhead),
        ("row_cost", row_cost),
        ("c_hat", c_hat),
        ("m", memory),
    ):
        _check(math.isfinite(value) and value >= 0, name, f"must be a number of at least 0, got {value}")
    _check(1 <= max_k <= limits.MAX_SPECULATIVE_TOKENS, "max_k", f"must be in [1, 32], got {max_k}")
    _check(0 <= k <= max_k, "k", f"must be in [0, {max_k}], got {k}")

    def gain(tokens: int, speedup: Callable[..., float] = theory.speedup) -> float:
        return speedup(alpha, c, tokens, overhead=overhead, row_cost=row_cost) if tokens else 1.0

    best = theory.best_k(alpha, c, max_k, overhead=overhead, row_cost=row_cost)
    ahead = theory.best_k_with_lookahead(alpha, c, max_k, overhead=overhead, row_cost=row_cost)
    helps = theory.improvement_possible(alpha, c)
    return Plan(
        alpha=alpha,
        c=c,
        overhead=overhead,
        row_cost=row_cost,
        c_hat=c_hat,
        m=memory,
        k=k,
        speedup=gain(k),
        expected_tokens=theory.expected_tokens(alpha, k),
        best_k=best,
        best_speedup=gain(best),
        improvement_possible=helps,
        least_improvement=theory.least_improvement(alpha, c) if helps else None,
        best_k_with_lookahead=ahead,
        best_speedup_with_lookahead=gain(ahead, theory.speedup_with_lookahead),
        oracle_bound=_finite(theory.oracle_bound(alpha)),
        oracle_bound_with_c=_finite(theory.oracle_bound(alpha, c)),
        rows=tuple(
            PlanRow(
                k=n,
                expected_tokens=theory.expected_tokens(alpha, n),
                speedup=gain(n),
                speedup_with_lookahead=gain(n, theory.speedup_with_lookahead),
                operations=theory.operations_factor(alpha, c_hat, n),
                memory=theory.memory_factor(alpha, memory, n),
            )
            for n in range(max_k + 1)
        ),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _check(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise InvalidArgumentError(field, message)
