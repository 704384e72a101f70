"""Expected gain of speculation: Leviathan et al. 2023, section 3. Standard library only.

`alpha` is the acceptance rate of one draft token, `k` the number of draft tokens per round, `c` the time of
one draft step over the time of one target step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


def measured_alpha(accepted: int, rejected: int) -> float | None:
    """Measured alpha: the accepted share of the verified draft tokens. None without verified tokens.

    A round verifies its draft tokens up to the first rejection. So every token of the text, except bonus
    tokens, is verified once, and the share is a mean over the text as in the paper (section 4.2). The rate at
    first positions alone would be higher: the token after a rejected one is easier to draft than others.
    """
    verified = accepted + rejected
    return accepted / verified if verified else None


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens of one round, the next token included: (1 - alpha^(k+1)) / (1 - alpha) (equation 1)."""
    _check(alpha, k)
    if alpha == 1:
        return float(k + 1)
    return (1 - alpha ** (k + 1)) / (1 - alpha)


def speedup(alpha: float, c: float, k: int, *, overhead: float = 0.0, row_cost: float = 0.0) -> float:
    """Speed-up of the time per token: expected tokens over the round's time (theorem 3.8).

    Args:
        alpha: acceptance rate.
        c: time per draft token over the target's step, without time hidden by lookahead.
        k: draft tokens per round.
        overhead: wire and queue time of a round over the target's step.
        row_cost: extra time of each row beyond the first over the target's step.
    """
    return expected_tokens(alpha, k) / (k * (c + row_cost) + 1 + overhead)


def speedup_with_lookahead(
    alpha: float, c: float, k: int, *, overhead: float = 0.0, row_cost: float = 0.0
) -> float:
    """Upper bound of the speed-up with lookahead: each proposal is drafted during the round before.

    A round then takes as long as its verification or its drafting, whichever is longer. The arguments are
    those of `speedup`.
    """
    return expected_tokens(alpha, k) / max(k * c, k * row_cost + 1 + overhead)


def operations_factor(alpha: float, c_hat: float, k: int) -> float:
    """Factor by which arithmetic operations per token increase (theorem 3.11).

    `c_hat` is the draft's operations per token over the target's.
    """
    return (k * c_hat + k + 1) / expected_tokens(alpha, k)


def memory_factor(alpha: float, m: float, k: int) -> float:
    """Memory read per token over that of plain decoding (section 3.4).

    The target's weights and cache are read once a round, for all its rows. The paper leaves the draft out:
    `m` is the memory that a draft step reads over that of a target step.
    """
    return (k * m + 1) / expected_tokens(alpha, k)


def improvement_possible(alpha: float, c: float) -> bool:
    """True when some k makes decoding faster: alpha > c (corollary 3.9)."""
    return alpha > c


def least_improvement(alpha: float, c: float) -> float:
    """The speed-up of k = 1, (1 + alpha) / (1 + c): a lower bound if alpha > c (corollary 3.9)."""
    return (1 + alpha) / (1 + c)


def best_k(alpha: float, c: float, max_k: int, *, overhead: float = 0.0, row_cost: float = 0.0) -> int:
    """The k in [0, max_k] with the greatest speed-up, the smallest among equals; 0 is plain decoding.

    The arguments are those of `speedup`; k = 0 has no overhead.
    """

    return _best(lambda k: speedup(alpha, c, k, overhead=overhead, row_cost=row_cost), max_k)


def best_k_with_lookahead(
    alpha: float, c: float, max_k: int, *, overhead: float = 0.0, row_cost: float = 0.0
) -> int:
    """As `best_k`, for `speedup_with_lookahead`."""
    return _best(lambda k: speedup_with_lookahead(alpha, c, k, overhead=overhead, row_cost=row_cost), max_k)


def _best(gain: Callable[[int], float], max_k: int) -> int:
    return max(range(max_k + 1), key=lambda k: gain(k) if k else 1.0)


def oracle_bound(alpha: float, c: float = 0.0) -> float:
    """Speed-up if exactly the accepted tokens were drafted: 1 / (1 - alpha + alpha * c) (section 3.5).

    A round has 1 / (1 - alpha) tokens, of which the draft computes all but one. The bound is at most
    e / (e - 1) = 1.58 times the speed-up of the best fixed k, which it approaches for alpha near 1.
    """
    _check(alpha, 0)
    seconds = 1 - alpha + alpha * c
    return 1 / seconds if seconds else math.inf


def acceptance_from(p: Sequence[float], q: Sequence[float]) -> float:
    """Acceptance rate of the ratio test at one position: the sum of min(p, q) (corollary 3.6)."""
    return math.fsum(min(a, b) for a, b in zip(p, q, strict=True))


def coupled_acceptance(p: Sequence[float], q: Sequence[float]) -> float:
    """Probability that the argmaxes under shared Gumbel noise agree (Daliri et al. 2025).

    The sum over v of 1 / sum over w of max(p_w / p_v, q_w / q_v); between (1 - TV) / (1 + TV) and 1 - TV.
    """
    pairs = list(zip(p, q, strict=True))
    return math.fsum(
        1 / math.fsum(max(a / p_v, b / q_v) for a, b in pairs) for p_v, q_v in pairs if p_v > 0 and q_v > 0
    )


def rejection_sampling_acceptance(p: Sequence[float], q: Sequence[float]) -> float:
    """Acceptance of textbook rejection sampling: the least q / p of all tokens with p > 0 (appendix A.2).

    0 as soon as the target can choose a token that the draft cannot. For comparison only.
    """
    return min(b / a for a, b in zip(p, q, strict=True) if a > 0)


def naive_acceptance(p: Sequence[float], q: Sequence[float]) -> float:
    """Acceptance of a rule that accepts a token if p >= q: the sum of such q. For comparison only.

    The rule changes the distribution of the output.
    """
    return math.fsum(b for a, b in zip(p, q, strict=True) if a >= b)


def _check(alpha: float, k: int) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be in [0, 1], got {alpha}")
    if k < 0:
        raise ValueError(f"k must be at least 0, got {k}")
