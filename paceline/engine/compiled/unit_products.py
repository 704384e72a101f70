"""Products by the matrix unit: rows are taken apart, parts meet tiles of weights, sums are put together.

Each output of a row is the same sums whatever other rows there are.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import njit

from paceline.engine.compiled.matrix_unit import (
    BLOCK,
    BYTES_DEPTH,
    DEPTH,
    MOST_WHOLE,
    PARTS,
    ROWS,
    add_digits,
    add_parts,
    begin,
    digits,
    end,
    meetings,
    split,
)
from paceline.engine.compiled.options import IN_ORDER
from paceline.engine.compiled.vectors import LANES, address_of

MOST_TOGETHER: Final = 16 * ROWS
"""Rows that meet a matrix while it is at hand. Their parts fit the second cache."""
SUMS: Final = 4 * BLOCK
"""Words for what two groups make of two tiles."""
_FINITE: Final = 0x7F7FFFFF
_SMALLEST: Final = -100
"""Exponent of what a row without a larger number is measured by."""


@njit(**IN_ORDER)
def _as_it_is(x, first, n):
    """Parts of bfloat16 have exponents of their own."""
    return np.float32(1.0), np.float32(1.0)


@njit(**IN_ORDER)
def _to_whole(x, first, n):
    """A power of two that makes whole numbers of at most `MOST_WHOLE` of x[first:][:n], rounded, and its
    inverse: NaN where the row is not all numbers, so that its sums are none."""
    bits, most = x[first : first + n].view(np.int32), np.int32(0)
    for i in range(n):
        size = np.int32(bits[i] & np.int32(0x7FFFFFFF))
        most = size if size > most else most
    if most > _FINITE:
        return np.float32(1.0), np.float32(np.nan)
    exponent = max(int(most >> 23) - 126, _SMALLEST)  # every number is less than 2^exponent
    return np.float32(2.0 ** (MOST_WHOLE - exponent)), np.float32(2.0 ** (exponent - MOST_WHOLE))


def _in_unit(depth, besides, measure, take_apart, meets, put_together):
    """The product of rows whose parts are taken apart and put together so; see `matrix_product`.

    besides: words of an output that are no weights.
    """
    one_by_one, one_by_two, two_by_one, two_by_two = meets

    @njit(**IN_ORDER)
    def pack(x, first, ldx, n_in, rows, group, blocks, packed, units):
        """The parts of x[:rows] as the unit takes them, in groups of so many rows: of each group `blocks`
        blocks. Inputs that are missing to a whole block are zero."""
        whole, block = n_in // depth, group * PARTS * LANES
        for r in range(rows):
            row = first + r * ldx
            scale, units[r] = measure(x, row, n_in)
            at = r // group * blocks * block + r % group * PARTS * LANES
            for k in range(whole):
                take_apart(address_of(x, row + k * depth), scale, address_of(packed, at + k * block))
            if whole < blocks:
                tail = np.zeros(depth, dtype=np.float32)
                tail[: n_in - whole * depth] = x[row + whole * depth : row + n_in]
                take_apart(address_of(tail, 0), scale, address_of(packed, at + whole * block))

    @njit(**IN_ORDER)
    def product(x, ldx, weights, offset, n_in, n_out, out, ldo, rows, work):
        blocks, tiles = (n_in + depth - 1) // depth, n_out // LANES
        group = max(min(rows, ROWS), 1)
        tall, block = blocks * BLOCK + besides * LANES, group * PARTS * LANES
        sums, units, packed = work[:SUMS], work[SUMS : SUMS + MOST_TOGETHER], work[SUMS + MOST_TOGETHER :]
        begin(group)
        for first in range(0, rows, MOST_TOGETHER):
            some = min(MOST_TOGETHER, rows - first)
            pack(x, first * ldx, ldx, n_in, some, group, blocks, packed, units)
            for t in range(0, tiles, 2):
                at_tile = offset + t * tall
                w, c = address_of(weights, at_tile), address_of(sums, 0)
                columns = min(2, tiles - t)
                for r in range(0, some, 2 * group):
                    a, further = address_of(packed, r // group * blocks * block), blocks * block
                    groups = 2 if some - r > group else 1
                    if groups == 2 and columns == 2:
                        two_by_two(a, further, block, w, tall, blocks, c)
                    elif groups == 2:
                        two_by_one(a, further, block, w, tall, blocks, c)
                    elif columns == 2:
                        one_by_two(a, further, block, w, tall, blocks, c)
                    else:
                        one_by_one(a, further, block, w, tall, blocks, c)
                    for m in range(min(groups * group, some - r)):
                        for column in range(columns):
                            part = (m // group * columns + column) * BLOCK + m % group * PARTS * LANES
                            at = (first + r + m) * ldo + (t + column) * LANES
                            scales = address_of(weights, at_tile + column * tall + blocks * BLOCK)
                            put_together(address_of(sums, part), units[r + m], scales, address_of(out, at))
        end()
        return offset + tiles * tall

    return product


product_of_halves = _in_unit(DEPTH, 0, _as_it_is, split, meetings("tdpbf16ps"), add_parts)
product_of_bytes = _in_unit(BYTES_DEPTH, 1, _to_whole, digits, meetings("tdpbssd"), add_digits)
