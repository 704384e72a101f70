"""A draft's token and the sparse distribution it was drawn from, from one row of scores: compiled, CPU.

The fewest tokens that hold a share of the row's mass are found without sorting: a radix selection over the
bits of the weights, which for positive float32 numbers stand in the order of the numbers. Nothing here may be
reordered or contracted, so a row gives the same bits whatever compiled function it becomes a part of: a chain
of draft tokens (engine/compiled/chain.py) and single steps draw alike. numba's cache does not see through
imports: after a change here, touch chain.py.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numba import njit
from torch import Tensor

from paceline.core.types import SparseDistribution
from paceline.decoding.sampling import draw, to_sparse, truncate_support, wire_form

STRICT: Final[dict[str, Any]] = {"nogil": True, "error_model": "numpy", "fastmath": False}
"""What is not said here a function takes over from the one that calls it: no liberties with sums is said."""
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
    length, kept = 0, 0.0
    for v in range(vocabulary):
        value = np.int64(bits[v])
        if value < least or value == 0 or length == bound:
            continue
        if value == least:
            if equal == 0:
                continue
            equal -= 1
        ids[length] = v
        kept += weights[v]
        length += 1
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


@njit(cache=True, **STRICT)
def _draw_rows(scores, mass, bound, u, ids, probabilities, lengths, tokens):
    """`draw_support` for each row of scores, float32 [R, V]."""
    weights = np.empty(scores.shape[1], dtype=np.float32)
    for r in range(len(scores)):
        tokens[r], lengths[r] = draw_support(
            scores[r], np.float32(1.0), mass, bound, u[r], weights, ids[r], probabilities[r]
        )


def draw_sparse(
    scores: Tensor, u: Tensor, mass: float, bound: int
) -> tuple[list[int], list[SparseDistribution]]:
    """Draw one token a row, each from exactly the distribution that goes with it.

    Args:
        scores: float32 [R, V], logits at the request's temperature, -inf for tokens that are filtered out.
        u: float64 [R], on the CPU, uniform in (0, 1).
        mass: share of each row's mass that the fewest likeliest tokens must hold, in (0, 1].
        bound: the most tokens a row.

    Returns:
        R tokens and R distributions. Those of a row that is no distribution mean nothing.
    """
    if scores.device.type != "cpu":
        ids, probabilities, lengths, _ = truncate_support(scores.softmax(-1), mass, bound)
        column = draw(probabilities, u.to(scores.device))
        return ids.gather(1, column[:, None])[:, 0].tolist(), to_sparse(ids, probabilities, lengths)
    rows, size = len(scores), min(bound, scores.shape[1])
    supports = np.empty((rows, size), dtype=np.uint32), np.empty((rows, size), dtype=np.float32)
    found = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.int64)
    _draw_rows(scores.contiguous().numpy(), mass, size, u.numpy(), *supports, *found)
    return found[1].tolist(), wire_form(*supports, found[0].tolist())
