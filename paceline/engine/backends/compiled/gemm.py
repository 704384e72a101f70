"""Products of a few rows with a matrix stored in tiles.

Each output of a row is one sum over its inputs, in their order, for any number of rows and any tile layout.
"""

from __future__ import annotations

from typing import Final

from numba import njit

from paceline.engine.backends.compiled.options import OPTIONS
from paceline.engine.backends.compiled.tiles import (
    AHEAD,
    BESIDE,
    BROAD,
    MOST_OF_BROAD,
    MOST_ROWS,
    PACE_BITS,
    add_floats,
    add_halves,
)
from paceline.engine.backends.compiled.vectors import LANES, address_of

_WAITING: Final = 2
"""With so few rows, one narrow tile has too few sums to occupy the arithmetic units."""


def by_rows(of, most):
    """A product of any number of rows, from one of at most `most` rows that share a read of the weights."""

    @njit(**OPTIONS)
    def product(x, ldx, w, n, out, to, ldo, rows, *tiles):
        r = 0
        for left in range((rows + most - 1) // most, 0, -1):
            some = (rows - r + left - 1) // left
            of(address_of(x, r * ldx), ldx, w, n, address_of(out, to + r * ldo), ldo, some, *tiles)
            r += some

    return product


def _streamed(of, most, stream, most_ahead):
    """`by_rows` for weights that exceed the nearest caches, with `stream` vectors of them in a row.

    The next weights are prefetched, `most_ahead` words ahead if one read serves all rows.
    """

    @njit(**OPTIONS)
    def product(x, ldx, w, n, out, to, ldo, rows, tiles, apart):
        r, reads, length = 0, (rows + most - 1) // most, stream * apart
        ahead, pace = min(most_ahead, length), 1 << PACE_BITS
        for left in range(reads, 0, -1):
            some = (rows - r + left - 1) // left
            if reads > 1:
                # Each read of a tile prefetches its share of the next one.
                ahead, pace = length + (reads - left) * length // reads, (1 << PACE_BITS) // reads
            some_x, some_out = address_of(x, r * ldx), address_of(out, to + r * ldo)
            of(some_x, ldx, w, n, some_out, ldo, some, tiles, apart, ahead, pace)
            r += some

    return product


def _product_of(sums, to_word):
    """The product with a matrix in words of `to_word` weights, by one or more vectors of outputs."""
    narrow, broad = sums
    streams = 1 if BESIDE else BROAD
    of_tile = _streamed(narrow, MOST_ROWS, 1, AHEAD)
    of_broad = _streamed(broad, MOST_OF_BROAD, BROAD // streams, AHEAD // streams)

    @njit(**OPTIONS)
    def product(x, ldx, weights, offset, n_in, n_out, out, ldo, rows):
        first, last, tall = 0, 0, n_in // to_word
        if BESIDE or rows <= _WAITING:
            last = n_out // (BROAD * LANES) * (BROAD * LANES)
        # With more rows than share a read, a tile is read again while it is in a near cache.
        width = last if rows <= MOST_OF_BROAD else BROAD * LANES
        while first < last:
            w = address_of(weights, offset + first * tall)
            of_broad(x, ldx, w, n_in, out, first, ldo, rows, width // LANES, tall * LANES)
            first += width
        width = n_out - first if rows <= MOST_ROWS else LANES
        while first < n_out:
            w = address_of(weights, offset + first * tall)
            of_tile(x, ldx, w, n_in, out, first, ldo, rows, width // LANES, tall * LANES)
            first += width
        return offset + n_out * tall

    return product


_product_of_floats = _product_of(add_floats, 1)
_product_of_halves = _product_of(add_halves, 2)


@njit(**OPTIONS)
def matrix_product(x, ldx, weights, halves, offset, n_in, n_out, out, ldo, rows):
    """out[:rows, :n_out] += x[:rows, :n_in] W, where W [n_in, n_out] begins at `offset` in tiles.

    `halves`: True if a word is two bfloat16 (weights.py), not a float32. Returns the offset of the next W.
    """
    if halves:
        return _product_of_halves(x, ldx, weights, offset, n_in, n_out, out, ldo, rows)
    return _product_of_floats(x, ldx, weights, offset, n_in, n_out, out, ldo, rows)
