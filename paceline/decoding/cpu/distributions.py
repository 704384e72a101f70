"""Distributions of single rows cut, drawn from, read and judged by: compiled, for a CPU.

**Nothing here may be reordered or contracted**, so that a row gives the same bits whatever compiled function
it becomes a part of: a chain of draft tokens (engine/compiled/chain.py) and single steps draw alike.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numba import njit

from paceline.decoding.cpu.kernel_cache import kept_on_disk

STRICT: Final[dict[str, Any]] = {"nogil": True, "error_model": "numpy", "fastmath": False}
"""What is not said here a function takes over from the one that calls it: no liberties with sums is said."""

RESIDUAL_FLOOR: Final = 1e-12
"""A residual that sums to less is rounding: p = q, and the next token is drawn from p."""

# ---- the draft: a token from the fewest likeliest ones ------------------------------------------------

_DIGITS: Final = ((21, 11), (10, 11), (0, 10))
"""Position and width of the parts of a weight's 32 bits, the highest first."""


@njit(**STRICT)
def _least_kept(weights, goal, bound):
    """Where the fewest largest weights that together reach `goal`, at most `bound` of them, end.

    Args:
        weights: float32 [V], none below 0.

    Returns:
        The bits of the least weight kept, and how many weights equal to it are.
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
    # All that are left have the same bits.
    equal, each = 0, mass[digit] / max(count[digit], 1)
    while equal < count[digit] and number + equal < bound and held + equal * each < goal:
        equal += 1
    return prefix, equal


@njit(**STRICT)
def draw_support(scores, temperature, mass, bound, u, weights, ids, probabilities):
    """Draw a token from the fewest likeliest tokens that hold `mass`, at most `bound`.

    The draw is from exactly the probabilities given, in proportion to them.

    Args:
        scores: float32 [V]: logits, -inf for tokens that are filtered out.
        temperature: float32, what the scores are divided by.
        u: uniform in (0, 1).
        weights: float32 [V], scratch.
        ids, probabilities: uint32 and float32 [at least `bound` or V]; filled in the order of ids.

    Returns:
        The token and the length of the support, which is 0 where scores are no distribution.
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
        # Written whether it is kept or not: which of the two it is cannot be foreseen, and a jump would be.
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
            at = i  # rounding may lift the point to the total itself
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


# ---- the target: chains judged by sparse distributions -------------------------------------------------
#
# Arrays of a batch of S chains with N draft tokens in all, whose supports hold M numbers in all:
#
#   draft: int64 [N], the chains one after the other; first: int64 [S + 1], where each one begins.
#   p: float64 [N + S, V], the target's distributions: one more than tokens of chain s, from row first[s] + s.
#   ids, values: uint32 and float32 [M], the supports; ends: int64 [N + 1], where each token's begins. Values
#       count in proportion to their float64 sum: that is q.
#
# The formulas are those of acceptance.py, which judges where the logits are not on a CPU.


@kept_on_disk(**STRICT)
def fault_of(ids, values, ends, vocabulary, drawn):
    """What is wrong with supports; 0 for nothing.

    Args:
        drawn: int64 [R], the token drawn from each one, -1 where that does not matter.

    Returns:
        1 for an id that is not in the vocabulary, 2 for a value that is negative or NaN, 3 for an infinite
        one, 4 for an id that comes again, 5 where no value is positive, 6 where that of `drawn` is not.
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
    """p / q of a draft token; NaN where both are 0, infinite where q alone is."""
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
    """Invert the cumulative weights, float64 [V]; never a token of weight 0 while there is another one."""
    total = 0.0
    for v in range(len(weights)):
        total += weights[v]
    point, running, at = u * total, 0.0, 0
    for v in range(len(weights)):
        if weights[v] > 0:
            at = v  # rounding may lift the point to the total itself
        running += weights[v]
        if running > point:
            break
    return at


@kept_on_disk(**STRICT)
def judge_one_by_one(draft, first, p, ids, values, ends, accept_u, accepted, scale):
    """Accept token after token with probability min(1, p/q), up to the first that fails.

    Args:
        accept_u: float64 [S, K], uniform in (0, 1).
        accepted: int64 [S], set to how many tokens of each chain are accepted.
        scale: float64 [S], set to 1: the correction's residual is that of p itself.
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
    """Accept up to the last token whose test is passed, by the ratio of all tokens up to it.

    Args:
        accept_u: float64 [S, K], uniform in (0, 1).
        accepted: int64 [S], set to how many tokens of each chain are accepted.
        scale: float64 [S], set to the factor of p in the correction's residual.
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
                if np.isnan(rest):  # nothing may follow: as at the end of a chain
                    threshold = pi
            if accept_u[s, i - 1] <= threshold:
                accepted[s], scale[s] = i, pi


@kept_on_disk(**STRICT)
def draw_next(first, p, ids, values, ends, accepted, scale, next_u, tokens):
    """Draw each chain's next token: from norm(max(0, scale p - q)) after a rejection, else from p.

    Args:
        accepted, scale: int64 and float64 [S], as a judge set them.
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
