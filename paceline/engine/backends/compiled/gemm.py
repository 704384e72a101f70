"""Products of a few rows with a matrix that lies in tiles.

Each output of a row is one sum over its inputs, in their order, however many rows there are and whatever
tiles the matrix lies in.
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
"""So few rows have too few sums in one narrow tile to keep the arithmetic busy."""


def by_rows(of, most):
    """A product of any number of rows, from one of at most so many, which share a read of what they read."""

    @njit(**OPTIONS)
    def product(x, ldx, w, n, out, to, ldo, rows, *tiles):
        r = 0
        for left in range((rows + most - 1) // most, 0, -1):
            some = (rows - r + left - 1) // left
            of(address_of(x, r * ldx), ldx, w, n, address_of(out, to + r * ldo), ldo, some, *tiles)
            r += some

    return product


def _streamed(of, most, stream, most_ahead):
    """The same for weights that are too many for the nearest caches, `stream` vectors of them in a row.

    Those that come next are fetched, `most_ahead` words before they are read where one read serves all rows.
    """

    @njit(**OPTIONS)
    def product(x, ldx, w, n, out, to, ldo, rows, tiles, apart):
        r, reads, length = 0, (rows + most - 1) // most, stream * apart
        ahead, pace = min(most_ahead, length), 1 << PACE_BITS
        for left in range(reads, 0, -1):
            some = (rows - r + left - 1) // left
            if reads > 1:
                # Each read of a tile lets its share of the next one come.
                ahead, pace = length + (reads - left) * length // reads, (1 << PACE_BITS) // reads
            some_x, some_out = address_of(x, r * ldx), address_of(out, to + r * ldo)
            of(some_x, ldx, w, n, some_out, ldo, some, tiles, apart, ahead, pace)
            r += some

    return product


def _product_of(sums, to_word):
    """The product with a matrix in words of so many weights: by one vector of outputs at a time, or more."""
    narrow, broad = sums
    streams = 1 if BESIDE else BROAD
    of_tile = _streamed(narrow, MOST_ROWS, 1, AHEAD)
    of_broad = _streamed(broad, MOST_OF_BROAD, BROAD // streams, AHEAD // streams)

    @njit(**OPTIONS)
    def product(x, ldx, weights, offset, n_in, n_out, out, ldo, rows):
        first, last, tall = 0, 0, n_in // to_word
        if BESIDE or rows <= _WAITING:
            last = n_out // (BROAD * LANES) * (BROAD * LANES)
        # More rows than share a read meet a tile while it is in a near cache.
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

    `halves`: whether a word is two bfloat16 (weights.py), not a float32. Returns where the next W begins.
    """
    if halves:
        return _product_of_halves(x, ldx, weights, offset, n_in, n_out, out, ldo, rows)
    return _product_of_floats(x, ldx, weights, offset, n_in, n_out, out, ldo, rows)
