"""Truncation, drawing, validation and acceptance with distributions of single rows, compiled for a CPU.

**No floating-point operation may be reordered or contracted**: a row must give the same bits in every
compiled caller, so that a chain of draft tokens (engine/compiled/chain.py) and single steps draw alike.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numba import njit

from paceline.decoding.cpu.kernel_cache import kept_on_disk

STRICT: Final[dict[str, Any]] = {"nogil": True, "error_model": "numpy", "fastmath": False}
"""Explicit options, because a function inherits unset ones from its caller: fastmath must be off."""

RESIDUAL_FLOOR: Final = 1e-12
"""A residual with a smaller sum is rounding error: p = q, and the next token is drawn from p."""

# ---- draft: draw from a truncated support --------------------------------------------------------------

_DIGITS: Final = ((21, 11), (10, 11), (0, 10))
"""Position and width of the radix digits in a weight's 32 bits, highest first."""


@njit(**STRICT)
def _least_kept(weights, goal, bound):
    """The cut-off of the fewest largest weights that together reach `goal`, at most `bound` of them.

    Args:
        weights: float32 [V], non-negative.

    Returns:
        The bits of the smallest kept weight, and the number of kept weights equal to it.
    """
    bits = weights.view(np.uint32)
    mass, count = np.empty(1 << 11, dtype=np.float64), np.empty(1 << 11, dtype=np.int64)
    held, number, prefix = 0.0, 0, 0
    digit: Any = 0
    for shift, width in _DIGITS:
        mass[:] = 0.0
        count[:] = 0
        for v in range(len(bits)):
            value = np.int64(bits[v])
            if value >> (shift + width) == prefix:
                digit = (value >> shift) & ((1 << width) - 1)
                mass[digit] += weights[v]
                count[digit] += 1
        digit = (1 << width) - 1
        while digit > 0 and held + mass[digit] < goal and number + count[digit] < bound:
            held += mass[digit]
            number += count[digit]
            digit -= 1
        prefix = prefix << width | digit
    # The remaining weights have the same bits.
    equal, each = 0, mass[digit] / max(count[digit], 1)
    while equal < count[digit] and number + equal < bound and held + equal * each < goal:
        equal += 1
    return prefix, equal


@njit(**STRICT)
def draw_support(scores, temperature, mass, bound, u, weights, ids, probabilities):
    """Draw a token from the fewest most likely tokens that reach `mass`, at most `bound`.

    The draw is exactly in proportion to the returned probabilities.

    Args:
        scores: float32 [V]: logits, -inf for filtered tokens.
        temperature: float32, divisor of the scores.
        u: uniform in (0, 1).
        weights: float32 [V], scratch.
        ids, probabilities: uint32 and float32 [at least `bound` or V]; filled in the order of ids.

    Returns:
        The token and the length of the support, which is 0 if the scores are not a distribution.
    """
    vocabulary = len(scores)
    most = np.float32(-np.inf)
    for v in range(vocabulary):
        weights[v] = scores[v] / temperature
        most = max(most, weights[v])
    whole = 0.0
    for v in range(vocabulary):
        weights[v] = math.exp(weights[v] - most)
        whole += weights[v]
    least, equal = _least_kept(weights, mass * whole, bound)
    bits = weights.view(np.uint32)
    length: Any = 0
    for v in range(vocabulary):
        if length == bound:
            break
        value = np.int64(bits[v])
        # Write unconditionally: a branch here would be mispredicted.
        ids[length] = v
        same = value == least and value > 0 and equal > 0
        equal -= same
        length += value > least or same
    kept = 0.0
    for i in range(length):
        kept += weights[ids[i]]
    total = 0.0
    for i in range(length):
        probabilities[i] = np.float32(weights[ids[i]] / kept)
        total += probabilities[i]
    point, running, at = u * total, 0.0, 0
    for i in range(length):
        if probabilities[i] > 0:
            at = i  # rounding may raise the point to the total itself
        running += probabilities[i]
        if running > point:
            break
    return (np.int64(ids[at]) if length > 0 else 0), length


@kept_on_disk(**STRICT)
def draw_rows(scores, mass, bound, u, ids, probabilities, lengths, tokens):
    """`draw_support` for each row of scores, float32 [R, V]."""
    weights = np.empty(scores.shape[1], dtype=np.float32)
    for r in range(len(scores)):
        tokens[r], lengths[r] = draw_support(
            scores[r], np.float32(1.0), mass, bound, u[r], weights, ids[r], probabilities[r]
        )


# ---- target: acceptance with sparse distributions -------------------------------------------------------
#
# Arrays of a batch of S chains with N draft tokens and M support entries in total:
#
#   draft: int64 [N], the concatenated chains; first: int64 [S + 1], offsets of the chains.
#   p: float64 [N + S, V], the target's distributions; chain s has one more row than tokens, from row
#       first[s] + s on.
#   ids, values: uint32 and float32 [M], the supports; ends: int64 [N + 1], their offsets. q is the values
#       divided by their float64 sum.
#
# The formulas are those of acceptance.py, which is used for logits on other devices.


@kept_on_disk(**STRICT)
def fault_of(ids, values, ends, vocabulary, drawn):
    """The first fault of the supports; 0 if valid.

    Args:
        drawn: int64 [R], the token drawn from each support, -1 to skip that check.

    Returns:
        1: an id outside the vocabulary; 2: a negative value or NaN; 3: an infinite value; 4: a repeated id;
        5: no positive value; 6: no positive value for `drawn`.
    """
    seen = np.zeros(vocabulary, dtype=np.bool_)
    for r in range(len(drawn)):
        positive, held = False, drawn[r] < 0
        for j in range(ends[r], ends[r + 1]):
            token, value = np.int64(ids[j]), values[j]
            if token >= vocabulary:
                return 1
            if not value >= 0:
                return 2
            if value == np.inf:
                return 3
            if seen[token]:
                return 4
            seen[token] = True
            positive = positive or value > 0
            held = held or (token == drawn[r] and value > 0)
        if not positive:
            return 5
        if not held:
            return 6
        for j in range(ends[r], ends[r + 1]):
            seen[ids[j]] = False
    return 0


@njit(**STRICT)
def _ratio(p, token, ids, values):
    """p / q of a draft token; NaN if both are 0, infinite if only q is 0."""
    total, own = 0.0, 0.0
    for j in range(len(ids)):
        total += values[j]
        if ids[j] == token:
            own = np.float64(values[j])
    return p[token] / (own / total)


@njit(**STRICT)
def _residual(p, scale, ids, values, weights):
    """weights = max(0, scale p - q), float64 [V]; returns their sum."""
    for v in range(len(p)):
        weights[v] = scale * p[v]
    total = 0.0
    for j in range(len(ids)):
        total += values[j]
    for j in range(len(ids)):
        weights[ids[j]] -= values[j] / total
    rest = 0.0
    for v in range(len(p)):
        weights[v] = max(weights[v], 0.0)
        rest += weights[v]
    return rest


@njit(**STRICT)
def _drawn(weights, u):
    """Invert the cumulative weights, float64 [V]; never returns weight 0 if there is a positive one."""
    total = 0.0
    for v in range(len(weights)):
        total += weights[v]
    point, running, at = u * total, 0.0, 0
    for v in range(len(weights)):
        if weights[v] > 0:
            at = v  # rounding may raise the point to the total itself
        running += weights[v]
        if running > point:
            break
    return at


@kept_on_disk(**STRICT)
def judge_one_by_one(draft, first, p, ids, values, ends, accept_u, accepted, scale):
    """Accept tokens with probability min(1, p/q) up to the first rejection.

    Args:
        accept_u: float64 [S, K], uniform in (0, 1).
        accepted: int64 [S], set to the number of accepted tokens of each chain.
        scale: float64 [S], set to 1: the residual uses p itself.
    """
    for s in range(len(accepted)):
        accepted[s], scale[s] = 0, 1.0
        for n in range(first[s], first[s + 1]):
            own = slice(ends[n], ends[n + 1])
            if not accept_u[s, n - first[s]] < _ratio(p[n + s], draft[n], ids[own], values[own]):
                break
            accepted[s] += 1


@kept_on_disk(**STRICT)
def judge_as_a_whole(draft, first, p, ids, values, ends, accept_u, accepted, scale):
    """Block verification: accept up to the last token that passes its test, which uses all earlier ratios.

    Args:
        accept_u: float64 [S, K], uniform in (0, 1).
        accepted: int64 [S], set to the number of accepted tokens of each chain.
        scale: float64 [S], set to the factor of p in the residual.
    """
    weights = np.empty(p.shape[1], dtype=np.float64)
    for s in range(len(accepted)):
        accepted[s], scale[s] = 0, 1.0
        pi, count = 1.0, first[s + 1] - first[s]
        for i in range(1, count + 1):
            n = first[s] + i - 1
            own = slice(ends[n], ends[n + 1])
            ratio = _ratio(p[n + s], draft[n], ids[own], values[own])
            pi *= ratio
            pi = 0.0 if np.isnan(pi) else min(pi, 1.0)
            threshold = pi
            if i < count:
                following = slice(ends[n + 1], ends[n + 2])
                rest = _residual(p[n + s + 1], pi, ids[following], values[following], weights)
                denominator = rest + 1.0 - pi
                threshold = rest / denominator if denominator > 0 else 1.0
                if np.isnan(rest):  # p is NaN if no token may follow: treat as the end of the chain
                    threshold = pi
            if accept_u[s, i - 1] <= threshold:
                accepted[s], scale[s] = i, pi


@kept_on_disk(**STRICT)
def draw_next(first, p, ids, values, ends, accepted, scale, next_u, tokens):
    """Draw each chain's next token: from norm(max(0, scale p - q)) after a rejection, else from p.

    Args:
        accepted, scale: int64 and float64 [S], as set by one of the functions above.
        next_u: float64 [S], uniform in (0, 1).
        tokens: int64 [S], set to the correction or the bonus.
    """
    weights = np.empty(p.shape[1], dtype=np.float64)
    for s in range(len(accepted)):
        n = first[s] + accepted[s]
        row = p[n + s]
        rest = 0.0
        if n < first[s + 1]:
            following = slice(ends[n], ends[n + 1])
            rest = _residual(row, scale[s], ids[following], values[following], weights)
        tokens[s] = _drawn(weights if rest > RESIDUAL_FLOOR else row, next_u[s])
