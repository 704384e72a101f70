"""Sums of products in registers, written as LLVM instructions that numba cannot express.

Each sum has a fixed order, whatever else is computed beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.extending import intrinsic

from paceline.engine.backends.compiled.vectors import (
    I64,
    LANES,
    POINTER,
    TO_WORDS,
    VECTOR,
    WORDS,
    load,
    multiply_add,
    prefetch,
    spread,
    store,
)

BESIDE: Final = bool(get_host_cpu_features().get("avx512f"))
"""True if the weights of `BROAD` vectors lie side by side for every input. They are then one stream of
memory, which is faster than the two streams of two consecutive tiles."""
BROAD: Final = 4 if BESIDE else 2
"""Vectors of outputs at a time: an input is loaded once for all, and fewer sums wait for their own result."""
MOST_ROWS: Final = 6
"""Maximum rows that share one read of a tile, so that registers remain for weights and an input."""
MOST_OF_BROAD: Final = 6 if BESIDE else 3
"""Maximum rows for `BROAD` vectors at a time: with 16 registers, this pays for very few rows only."""

AHEAD: Final = 3072
"""Prefetch distance in words: a processor's own prefetching stops at every page."""
PACE_BITS: Final = 16
"""A pace is in units of 2^-16."""


def _inputs_at(b: Any, pointer: Any, to_word: int) -> list[Any]:
    """The weights of 16 outputs at an address, as float32: of two inputs if two share a word."""
    if to_word == 1:
        return [load(b, pointer)]
    # The bits of a bfloat16 are the upper half of a float32.
    words = load(b, pointer, WORDS)
    low = b.shl(words, ir.Constant(WORDS, [16] * LANES))
    high = b.and_(words, ir.Constant(WORDS, [0xFFFF0000] * LANES))
    return [b.bitcast(low, VECTOR), b.bitcast(high, VECTOR)]


def _one_turn_at_a_time(module: Any) -> Any:
    """Metadata of a loop that LLVM must not unroll. Like all loop metadata, it refers to itself first."""
    told = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    loop = module.add_metadata([ir.MetaDataString(module, f"loop {len(module.metadata)}"), told])
    loop.operands = (loop, told)
    return loop


def _fetch_ahead(b: Any, tiles: Sequence[Any], place: Any, apart: Any, ahead: Any, pace: Any) -> None:
    """Prefetch the words to be read after those at `place` of these tiles, which may lie `apart`."""
    ahead = b.add(b.ashr(b.mul(place, pace), ir.Constant(I64, PACE_BITS)), ahead)
    if apart is not None:
        # After the end of these tiles, prefetch the tiles after all of them.
        past = b.icmp_signed(">=", ahead, apart)
        others = b.mul(apart, ir.Constant(I64, len(tiles) - 1))
        ahead = b.add(ahead, b.select(past, others, ir.Constant(I64, 0)))
    for at in tiles:
        prefetch(b, b.gep(at, [ahead]), 3)


def _fetch_by_index(b: Any, i: Any, one: Any, other: Any, of_one: Any, of_other: Any, stride: Any) -> None:
    """Prefetch one of the 16-word lines that begin at two indices of 16 places each."""
    lane, line = b.and_(i, ir.Constant(I64, LANES - 1)), b.and_(i, ir.Constant(I64, -LANES))
    for index, of in ((one, of_one), (other, of_other)):
        slot = b.load(b.gep(index, [lane]))
        prefetch(b, b.gep(of, [b.add(b.mul(slot, stride), line)]), 2)


def _vectors_at(b: Any, w: Any, count: int, apart: Any) -> list[Any]:
    """Addresses of `count` vectors of an input's weights: side by side, or `apart`."""
    offsets = [
        ir.Constant(I64, u * LANES) if apart is None else b.mul(apart, ir.Constant(I64, u))
        for u in range(count)
    ]
    return [b.gep(w, [offset]) for offset in offsets]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """The parameters of `_sum_of_products`."""

    wide: int = 1
    beside: bool = False
    indexed: bool = False
    fetches: bool = False
    adds: bool = False
    to_word: int = 1


def _sum_rows(b: Any, args: Any, rows: int, after: Any, kind: _Kind) -> None:
    """The sums of `rows` rows; then branch to `after`."""
    x, ldx, w, n, out, ldo, _, tiles, apart = args[:9]
    wide, between, fma = kind.wide, None if kind.beside else apart, multiply_add(b)

    def number(value: int) -> Any:
        return ir.Constant(I64, value)

    inputs = [b.gep(x, [b.mul(ldx, number(r))]) for r in range(rows)]
    before, begin = b.basic_block, b.append_basic_block("tile")
    loop, done = b.append_basic_block("sum"), b.append_basic_block("summed")
    b.branch(begin)

    b.position_at_end(begin)
    t = b.phi(I64)
    weights_at = _vectors_at(b, b.gep(w, [b.mul(t, apart)]), wide, between)
    first = b.gep(out, [b.mul(t, number(LANES))])
    each = [(r, u) for r in range(rows) for u in range(wide)]
    outputs = [b.gep(first, [b.add(b.mul(ldo, number(r)), number(u * LANES))]) for r, u in each]
    starts = [load(b, pointer) if kind.adds else ir.Constant(VECTOR, None) for pointer in outputs]
    b.branch(loop)

    b.position_at_end(loop)
    i = b.phi(I64)
    sums = [b.phi(VECTOR) for _ in each]
    place = b.mul(i, number(LANES * wide if kind.beside else LANES))
    if kind.indexed:
        place = b.mul(b.load(b.gep(args[9], [i])), args[10])
        for at in weights_at:
            prefetch(b, b.gep(at, [b.add(place, args[11])]), 2)
    if kind.fetches:
        _fetch_by_index(b, i, *args[9:])
    vectors = [_inputs_at(b, b.gep(at, [place]), kind.to_word) for at in weights_at]
    if kind.adds:
        _fetch_ahead(b, weights_at, place, between, *args[9:])
    grown: list[Any] = list(sums)
    for step, weights in enumerate(zip(*vectors, strict=True)):
        at = b.add(b.mul(i, number(kind.to_word)), number(step))
        numbers = [spread(b, b.load(b.gep(row, [at]))) for row in inputs]
        grown = [
            b.call(fma, [numbers[r], weights[u], total]) for (r, u), total in zip(each, grown, strict=True)
        ]
    following = b.add(i, number(1))
    for phi, start, value in zip([i, *sums], [number(0), *starts], [following, *grown], strict=True):
        phi.add_incoming(start, begin)
        phi.add_incoming(value, loop)
    again = b.cbranch(b.icmp_signed("<", following, b.sdiv(n, number(kind.to_word))), loop, done)
    if wide > 1:
        again.set_metadata("llvm.loop", _one_turn_at_a_time(b.module))

    b.position_at_end(done)
    for total, pointer in zip(grown, outputs, strict=True):
        store(b, total, pointer)
    next_tile = b.add(t, number(wide))
    t.add_incoming(number(0), before)
    t.add_incoming(next_tile, done)
    b.cbranch(b.icmp_signed("<", next_tile, tiles), begin, after)


def _sum_of_products(most: int, **what: Any) -> Any:
    """out[r, :16] = sum over i < n of x[r, i] * w[i, :16], in the order of i, summed in registers, r < rows.

    x[r] begins at x + r * ldx, out[r] at out + r * ldo, w[i] at w + i * 16. n is positive, and rows is 1 to
    `most`. The same holds for each of `tiles` groups of 16 outputs, a multiple of `wide`, which are computed
    at the same time: w of the next group begins `apart` words after that of the previous one. Options:

    beside: the weights of `wide` groups lie side by side: w[i] of the first begins at w + i * 16 * `wide`,
    that
        of each other group 16 words after the previous one. The next `wide` groups begin `wide` * `apart`
        words
        later.
    indexed: w[i] begins at w + index[i] * stride, and the data `further` words later is prefetched.
    fetches: with w[i], line i // 16 (of 16 words) of the data at of + index[i % 16] * stride is prefetched,
    for
        two indices.
    adds: the sum begins with the value in out. w is long and is prefetched: with the word at place p of a
    tile,
        the word at `ahead` + `pace` p, at most two tiles later; the next tile follows the end of a tile.
    to_word: 2 if a word is two bfloat16, as weights.py lays them out; n is then even.
    """

    kind = _Kind(**what)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        after = b.append_basic_block("all_summed")
        cases = b.switch(args[6], after)
        for rows in range(1, most + 1):
            these = b.append_basic_block(f"rows_{rows}")
            cases.add_case(ir.Constant(I64, rows), these)
            b.position_at_end(these)
            _sum_rows(b, args, rows, after, kind)
        b.position_at_end(after)
        return context.get_dummy_value()

    size = types.int64
    plain = (POINTER, size, POINTER, size, POINTER, *[size] * 4)
    if kind.indexed:

        @intrinsic
        def gathered(
            typing: Any, x: Any, ldx: Any, w: Any, n: Any, out: Any, ldo: Any, rows: Any, tiles: Any,
            apart: Any, index: Any, stride: Any, further: Any,
        ) -> Any:  # fmt: skip
            return types.void(*plain, types.CPointer(size), size, size), generate

        return gathered
    if kind.adds:

        @intrinsic
        def added(
            typing: Any, x: Any, ldx: Any, w: Any, n: Any, out: Any, ldo: Any, rows: Any, tiles: Any,
            apart: Any, ahead: Any, pace: Any,
        ) -> Any:  # fmt: skip
            return types.void(*plain[:2], TO_WORDS, *plain[3:], size, size), generate

        return added

    @intrinsic
    def fetching(
        typing: Any, x: Any, ldx: Any, w: Any, n: Any, out: Any, ldo: Any, rows: Any, tiles: Any, apart: Any,
        index: Any, second_index: Any, of: Any, second_of: Any, stride: Any,
    ) -> Any:  # fmt: skip
        slots = types.CPointer(size)
        return types.void(*plain, slots, slots, POINTER, POINTER, size), generate

    return fetching


def _adding(to_word: int) -> tuple[Any, Any]:
    """Sums of long products, by one vector of outputs and by `BROAD` of them."""
    broad = _sum_of_products(MOST_OF_BROAD, wide=BROAD, beside=BESIDE, adds=True, to_word=to_word)
    return _sum_of_products(MOST_ROWS, adds=True, to_word=to_word), broad


add_floats = _adding(1)
add_halves = _adding(2)
tile = _sum_of_products(MOST_ROWS, fetches=True)
mix = _sum_of_products(MOST_ROWS, indexed=True)
