"""Philox4x64-10 (Salmon et al. 2011) compiled for a CPU: the uniforms of noise.py.

A round of ratio tests needs only a few numbers, for which setting up numpy's generator takes too long.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from paceline.decoding.cpu.kernel_cache import kept_on_disk

MULTIPLIERS: Final = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
KEY_STEPS: Final = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
ROUNDS: Final = 10

_M0, _M1 = (np.uint64(number) for number in MULTIPLIERS)
_W0, _W1 = (np.uint64(number) for number in KEY_STEPS)
_NOTHING, _ONE, _SPARE = np.uint64(0), np.uint64(1), np.uint64(12)


@intrinsic
def _multiply(typing: Any, a: Any, b: Any) -> Any:
    """The high and low 64 bits of a product of two uint64: one instruction that numba does not expose."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, wide = ir.IntType(64), ir.IntType(128)
        product = builder.mul(*(builder.zext(factor, wide) for factor in args))
        high = builder.lshr(product, ir.Constant(wide, 64))
        halves = [builder.trunc(part, word) for part in (high, product)]
        return context.make_tuple(builder, signature.return_type, halves)

    return types.UniTuple(types.uint64, 2)(types.uint64, types.uint64), generate


@njit(nogil=True, fastmath=False)
def mapped(word):
    """Map a uint64 to a float64 strictly between 0 and 1, as `noise.uniforms`."""
    return (np.float64(word >> _SPARE) + 0.5) * 2.0**-52


@njit(nogil=True)
def words_of(block, position, draft_index, seed, purpose):
    """The four words of a stream's block, counted from 0. All numbers are uint64."""
    # The counter's first word is 1 at the first block.
    c0, c1, c2, c3 = block + _ONE, position, draft_index, _NOTHING
    k0, k1 = seed, purpose
    for _ in range(ROUNDS):
        high0, low0 = _multiply(_M0, c0)
        high1, low1 = _multiply(_M1, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += _W0
        k1 += _W1
    return c0, c1, c2, c3


@kept_on_disk(nogil=True, fastmath=False)
def fill_uniforms(seeds, positions, draft_index, purpose, values):
    """Fill row r of `values`, float64 [N, count], with (seeds[r], positions[r], draft_index, purpose).

    seeds, positions: uint64 [N]; draft_index, purpose: uint64.
    """
    count = values.shape[1]
    for r in range(len(seeds)):
        for block in range((count + 3) // 4):
            j = 4 * block
            for word in words_of(np.uint64(block), positions[r], draft_index, seeds[r], purpose):
                if j < count:
                    values[r, j] = mapped(word)
                j += 1
