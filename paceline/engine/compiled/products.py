"""Products of a few rows with a matrix that lies in tiles.

Each output of a row is one sum over its inputs, in their order, however many rows there are and whatever
tiles the matrix lies in.
"""

from __future__ import annotations

from typing import Final

from numba import njit

from paceline.engine.compiled.matrix_unit import BYTES_DEPTH, DEPTH, IN_PROCESSOR, PARTS
from paceline.engine.compiled.options import OPTIONS
from paceline.engine.compiled.tiles import (
    AHEAD,
    BESIDE,
    BROAD,
    MOST_OF_BROAD,
    MOST_ROWS,
    PACE_BITS,
    add_bytes,
    add_floats,
    add_halves,
)
from paceline.engine.compiled.unit_products import (
    MOST_TOGETHER,
    SUMS,
    product_of_bytes,
    product_of_halves,
)
from paceline.engine.compiled.vectors import LANES, address_of

_WAITING: Final = 2
"""So few rows have too few sums in one narrow tile to keep the arithmetic busy."""

FLOATS: Final = 0
HALVES: Final = 1
"""Two bfloat16 to a word."""
FOR_UNIT: Final = 2
"""The same, in tiles as the matrix unit takes them (weights.py)."""
BYTES: Final = 3
"""Four int8 to a word, and for each output what its sum is multiplied by."""
BYTES_FOR_UNIT: Final = 4
"""The same, in tiles as the matrix unit takes them."""
DEPTH_IN_UNIT: Final = {FOR_UNIT: DEPTH, BYTES_FOR_UNIT: BYTES_DEPTH}
"""Inputs that meet at a time there."""


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


def _product_of(sums, to_word, besides=0):
    """The product with a matrix in words of so many weights: by one vector of outputs at a time, or more.

    besides: words of an output that are no weights.
    """
    narrow, broad = sums
    streams = 1 if BESIDE else BROAD
    of_tile = _streamed(narrow, MOST_ROWS, 1, AHEAD)
    of_broad = _streamed(broad, MOST_OF_BROAD, BROAD // streams, AHEAD // streams)

    @njit(**OPTIONS)
    def product(x, ldx, weights, offset, n_in, n_out, out, ldo, rows):
        first, last, tall = 0, 0, n_in // to_word + besides
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
_product_of_bytes = _product_of(add_bytes, 4, besides=1)


@njit(**OPTIONS)
def _no_unit(x, ldx, weights, offset, n_in, n_out, out, ldo, rows, work):
    return offset


_halves_in_unit = product_of_halves if IN_PROCESSOR else _no_unit
_bytes_in_unit = product_of_bytes if IN_PROCESSOR else _no_unit


def work_of_product(form: int, n_in: int) -> int:
    """Words of scratch that a product of rows of so many inputs needs where weights lie so."""
    if form not in (FOR_UNIT, BYTES_FOR_UNIT):
        return 0
    depth = DEPTH if form == FOR_UNIT else BYTES_DEPTH
    return SUMS + -(-n_in // depth) * MOST_TOGETHER * PARTS * LANES + MOST_TOGETHER


@njit(**OPTIONS)
def matrix_product(x, ldx, weights, form, offset, n_in, n_out, out, ldo, rows, work):
    """out[:rows, :n_out] += x[:rows, :n_in] W, where W [n_in, n_out] begins at `offset` in tiles.

    `form` says how the tiles lie: FLOATS, HALVES, FOR_UNIT, BYTES or BYTES_FOR_UNIT; work: float32, as many
    as `work_of_product` says, from where a line of the cache begins. Returns where the next W begins.
    """
    if form == FOR_UNIT:
        return _halves_in_unit(x, ldx, weights, offset, n_in, n_out, out, ldo, rows, work)
    if form == BYTES_FOR_UNIT:
        return _bytes_in_unit(x, ldx, weights, offset, n_in, n_out, out, ldo, rows, work)
    if form == BYTES:
        return _product_of_bytes(x, ldx, weights, offset, n_in, n_out, out, ldo, rows)
    if form == HALVES:
        return _product_of_halves(x, ldx, weights, offset, n_in, n_out, out, ldo, rows)
    return _product_of_floats(x, ldx, weights, offset, n_in, n_out, out, ldo, rows)
