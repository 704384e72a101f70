"""Tokens with the highest score + coupled noise, compiled for a CPU.

A token's noise is a double logarithm of a random word. Words are cheap; the logarithms dominate the cost. The
first bits of a word bound its noise from above, and for about ten of two thousand tokens the bound exceeds
the best value so far. Only for those is the noise computed. The result equals that of
`coupled.add_coupled_noise`, up to the last bit of a logarithm.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt
from numba import njit

from paceline.decoding.cpu.distributions import STRICT
from paceline.decoding.cpu.kernel_cache import kept_on_disk
from paceline.decoding.cpu.philox import mapped, words_of
from paceline.decoding.noise import Purpose

_COUPLED: Final = np.uint64(Purpose.COUPLED)
_NO_DRAFT: Final = np.uint64(0)
_FIRST_BITS: Final = 8
_REST: Final = np.uint64(64 - _FIRST_BITS)
_HIGHEST: Final = 37.0
"""Above -log(-log(u)) of the largest u: 36.74 for 1 - 2^-53."""


def _ceilings() -> npt.NDArray[np.float64]:
    """Upper bound of a word's noise, indexed by the word's first bits."""
    ends = np.arange(1, 1 << _FIRST_BITS) / (1 << _FIRST_BITS)
    return np.append(-np.log(-np.log(ends)) + 1e-9, _HIGHEST)


_CEILINGS: Final = _ceilings()


@njit(**STRICT)
def _enter(values, tokens, value, token):
    """Insert a token that beats the last of the best tokens; equal values stay before it."""
    at = len(values) - 1
    while at > 0 and values[at - 1] < value:
        values[at], tokens[at] = values[at - 1], tokens[at - 1]
        at -= 1
    values[at], tokens[at] = value, token


@njit(**STRICT)
def best_of(row, vocabulary, temperature, noisy, seed, position, values, tokens):
    """Find the tokens with the highest row / temperature + noise; among equals, the lowest id comes first.

    Args:
        row: float32 [V or more]: logits, -inf for excluded tokens.
        vocabulary: V.
        temperature: float64, above 0.
        noisy: whether to add noise.
        seed, position: uint64: the request's seed and the position of the token to choose.
        values, tokens: float64 and int64 [count]: filled, best first; -inf and -1 if there are fewer.
    """
    values[:] = -np.inf
    tokens[:] = -1
    last = len(values) - 1
    if not noisy:
        for v in range(vocabulary):
            value = np.float64(row[v]) / temperature
            if value > values[last]:
                _enter(values, tokens, value, v)
        return
    for block in range((vocabulary + 3) // 4):
        v = 4 * block
        for word in words_of(np.uint64(block), position, _NO_DRAFT, seed, _COUPLED):
            if v < vocabulary:
                value = np.float64(row[v]) / temperature
                if value + _CEILINGS[word >> _REST] > values[last]:
                    value -= math.log(-math.log(mapped(word)))
                    if value > values[last]:
                        _enter(values, tokens, value, v)
            v += 1


@njit(**STRICT)
def _is_distribution(bits):
    """Whether float32 logits (viewed as int32) define a distribution: no NaN or +inf, and not all -inf."""
    odd, impossible = 0, 0
    for b in bits:
        odd += (b & 0x7FFFFFFF) >= 0x7F800000  # NaN or infinite
        impossible += b == -0x800000  # -inf
    return odd == impossible < len(bits)


@kept_on_disk(**STRICT)
def choose_rows(logits, rows, temperatures, noisy, seeds, positions, tokens, usable):
    """Choose the tokens of requests that use no parameter but a temperature: `best_of` for each row.

    Args:
        logits: float32 [R, V]; each request has consecutive rows.
        rows: int64 [S]: number of rows of each request.
        temperatures: float32 [S], above 0. Quotients are rounded to float32, as in tensors.
        noisy, seeds: bool and uint64 [S]: as for `best_of`.
        positions: uint64 [R]: as for `best_of`; rows at the same depth of a tree share one.
        tokens: int64 [R]: filled.
        usable: bool [R]: filled: whether the row is a distribution; if not, its token is invalid.
    """
    scores, vocabulary = np.empty(logits.shape[1], dtype=np.float32), logits.shape[1]
    value, token, r = np.empty(1), np.empty(1, dtype=np.int64), 0
    for s in range(len(rows)):
        for _ in range(rows[s]):
            usable[r] = _is_distribution(logits[r].view(np.int32))
            scores[:] = logits[r] / temperatures[s]
            best_of(scores, vocabulary, 1.0, noisy[s], seeds[s], positions[r], value, token)
            tokens[r] = token[0]
            r += 1


@kept_on_disk(**STRICT)
def best_rows(scores, noisy, seeds, positions, values, tokens):
    """`best_of` for each row of scores, float32 [R, V]. `values`, `tokens` are [R, count], the rest [R]."""
    for r in range(len(scores)):
        best_of(
            scores[r], scores.shape[1], 1.0, noisy[r], seeds[r], positions[r], values[r], tokens[r]
        )  # fmt: skip
