"""Sums of products in registers, written as LLVM instructions: what numba has no words for.

Each sum is taken in one order, whatever else is computed beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES: Final = 16
"""Numbers of a vector: two AVX registers, one AVX-512 register, four of NEON."""
BESIDE: Final = bool(get_host_cpu_features().get("avx512f"))
"""Whether weights of `BROAD` vectors lie side by side for every input. All of them are one stream of memory
then; two tiles at a time, one behind the other, are two, which memory gives less of."""
BROAD: Final = 4 if BESIDE else 2
"""Vectors of outputs at a time: an input is loaded once for all, and fewer sums wait for their own."""
MOST_ROWS: Final = 6
"""Rows that share one read of a tile: their sums leave room among the registers for weights and an input."""
MOST_OF_BROAD: Final = 6 if BESIDE else 3
"""The same for `BROAD` vectors at a time: with 16 registers it pays for very few rows only."""

AHEAD: Final = 3072
"""Weights are fetched so many words ahead: a processor's own prefetching stops at every page."""
PACE_BITS: Final = 16
"""A pace is in units of 2^-16."""

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_VECTOR = ir.VectorType(_F32, LANES)
_WORDS = ir.VectorType(_I32, LANES)
POINTER = types.CPointer(types.float32)
TO_WORDS = types.CPointer(types.uint32)


@intrinsic
def address_of(typing: Any, array: Any, index: Any) -> Any:
    """The address of a flat array's element."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, b, args[0]).data
        return b.gep(data, [args[1]])

    return types.CPointer(array.dtype)(array, types.int64), generate


@intrinsic
def fetch(typing: Any, pointer: Any) -> Any:
    """Ask for the line that is there."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        _prefetch(b, args[0], 2)
        return context.get_dummy_value()

    return types.void(POINTER), generate


@intrinsic
def exp(typing: Any, x: Any) -> Any:
    """e^x for x <= 0 to a unit or two in the last place; NaN for NaN. In instructions that loops can widen.

    Reduced by Cody and Waite to e^r 2^n with |r| <= ln(2) / 2; the polynomial is that of Cephes' expf.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_F32, [_F32] * 3)
        multiply_add = cgutils.get_or_insert_function(b.module, kind, "llvm.fma.f32")

        def number(value: float) -> Any:
            return ir.Constant(_F32, float(np.float32(value)))

        def fma(one: Any, other: Any, addend: Any) -> Any:
            return b.call(multiply_add, [one, other, addend])

        # Below, 2^n would leave the range of normal numbers. Unordered comparison is false: NaN stays.
        low = b.fcmp_ordered("<", args[0], number(-87.0))
        x = b.select(low, number(-87.0), args[0])
        # Adding 1.5 * 2^23 rounds to a whole number, which then stands in the low bits.
        rounder = number(12582912.0)
        shifted = fma(x, number(1.44269504), rounder)
        n = b.fsub(shifted, rounder)
        r = fma(n, number(-0.693359375), x)
        r = fma(n, number(2.12194440e-4), r)
        p = number(1.9875691500e-4)
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1, 1):
            p = fma(p, r, number(c))
        exponent = b.add(b.bitcast(shifted, _I32), ir.Constant(_I32, 127))
        return b.fmul(p, b.bitcast(b.shl(exponent, ir.Constant(_I32, 23)), _F32))

    return types.float32(types.float32), generate


def load(b: Any, pointer: Any, kind: Any = _VECTOR) -> Any:
    value = b.load(b.bitcast(pointer, kind.as_pointer()))
    value.align = 4
    return value


def _halves(b: Any, words: Any) -> tuple[Any, Any]:
    """The two bfloat16 of each word as float32, the lower one first: their bits are its upper ones."""
    low = b.shl(words, ir.Constant(_WORDS, [16] * LANES))
    high = b.and_(words, ir.Constant(_WORDS, [0xFFFF0000] * LANES))
    return b.bitcast(low, _VECTOR), b.bitcast(high, _VECTOR)


def store(b: Any, value: Any, pointer: Any) -> None:
    b.store(value, b.bitcast(pointer, value.type.as_pointer())).align = 4


def _prefetch(b: Any, pointer: Any, nearness: int) -> None:
    """Ask for what is there: into the nearest cache (3) or the next one (2)."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
    fetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    read, data = ir.Constant(_I32, 0), ir.Constant(_I32, 1)
    b.call(fetch, [b.bitcast(pointer, byte), read, ir.Constant(_I32, nearness), data])


def _spread(b: Any, scalar: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    one = b.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return b.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(_I32, LANES), None))


def _one_turn_at_a_time(module: Any) -> Any:
    """Metadata of a loop that LLVM must not unroll. It names itself first, as that of every loop does."""
    told = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    loop = module.add_metadata([ir.MetaDataString(module, f"loop {len(module.metadata)}"), told])
    loop.operands = (loop, told)
    return loop


def _fetch_ahead(b: Any, tiles: Sequence[Any], place: Any, apart: Any, ahead: Any, pace: Any) -> None:
    """Ask for words that will be read after those at `place` of these tiles, which may lie `apart`."""
    ahead = b.add(b.ashr(b.mul(place, pace), ir.Constant(_I64, PACE_BITS)), ahead)
    if apart is not None:
        # Past the end of these tiles come those after all of them.
        past = b.icmp_signed(">=", ahead, apart)
        others = b.mul(apart, ir.Constant(_I64, len(tiles) - 1))
        ahead = b.add(ahead, b.select(past, others, ir.Constant(_I64, 0)))
    for at in tiles:
        _prefetch(b, b.gep(at, [ahead]), 3)


def _fetch_by_index(b: Any, i: Any, one: Any, other: Any, of_one: Any, of_other: Any, stride: Any) -> None:
    """Ask for one of the lines, 16 words each, that begin where two indices of 16 places each point."""
    lane, line = b.and_(i, ir.Constant(_I64, LANES - 1)), b.and_(i, ir.Constant(_I64, -LANES))
    for index, of in ((one, of_one), (other, of_other)):
        slot = b.load(b.gep(index, [lane]))
        _prefetch(b, b.gep(of, [b.add(b.mul(slot, stride), line)]), 2)


def _vectors_at(b: Any, w: Any, count: int, apart: Any) -> list[Any]:
    """Where so many vectors of an input's weights begin: side by side, or `apart`."""
    offsets = [
        ir.Constant(_I64, u * LANES) if apart is None else b.mul(apart, ir.Constant(_I64, u))
        for u in range(count)
    ]
    return [b.gep(w, [offset]) for offset in offsets]


def _sum_rows(
    b: Any,
    args: Any,
    rows: int,
    after: Any,
    *,
    wide: int,
    beside: bool,
    indexed: bool,
    fetches: bool,
    adds: bool,
    halves: bool,
) -> None:
    """The sums of so many rows; `after` comes then. What `_sum_of_products` says."""
    x, ldx, w, n, out, ldo, _, tiles, apart = args[:9]
    stride = wide if beside else 1
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    fma = cgutils.get_or_insert_function(b.module, kind, f"llvm.fma.v{LANES}f32")

    def number(value: int) -> Any:
        return ir.Constant(_I64, value)

    inputs = [b.gep(x, [b.mul(ldx, number(r))]) for r in range(rows)]
    before, begin = b.basic_block, b.append_basic_block("tile")
    loop, done = b.append_basic_block("sum"), b.append_basic_block("summed")
    b.branch(begin)

    b.position_at_end(begin)
    t = b.phi(_I64)
    weights_at = _vectors_at(b, b.gep(w, [b.mul(t, apart)]), wide, None if beside else apart)
    first = b.gep(out, [b.mul(t, number(LANES))])
    each = [(r, u) for r in range(rows) for u in range(wide)]
    outputs = [b.gep(first, [b.add(b.mul(ldo, number(r)), number(u * LANES))]) for r, u in each]
    starts = [load(b, pointer) if adds else ir.Constant(_VECTOR, None) for pointer in outputs]
    b.branch(loop)

    b.position_at_end(loop)
    i = b.phi(_I64)
    sums = [b.phi(_VECTOR) for _ in each]
    place = b.mul(i, number(stride * LANES))
    if indexed:
        place = b.mul(b.load(b.gep(args[9], [i])), args[10])
    if fetches:
        _fetch_by_index(b, i, *args[9:])
    words = [load(b, b.gep(at, [place]), _WORDS if halves else _VECTOR) for at in weights_at]
    if indexed:
        for at in weights_at:
            _prefetch(b, b.gep(at, [b.add(place, args[11])]), 2)
    if adds:
        _fetch_ahead(b, weights_at, place, None if beside else apart, *args[9:])
    grown: list[Any] = list(sums)
    by_input = list(zip(*(_halves(b, word) for word in words), strict=True)) if halves else [words]
    for step, weights in enumerate(by_input):
        at = b.add(b.mul(i, number(2)), number(step)) if halves else i
        spread = [_spread(b, b.load(b.gep(row, [at]))) for row in inputs]
        grown = [
            b.call(fma, [spread[r], weights[u], total]) for (r, u), total in zip(each, grown, strict=True)
        ]
    following = b.add(i, number(1))
    for phi, start, value in zip([i, *sums], [number(0), *starts], [following, *grown], strict=True):
        phi.add_incoming(start, begin)
        phi.add_incoming(value, loop)
    turns = b.sdiv(n, number(2)) if halves else n
    again = b.cbranch(b.icmp_signed("<", following, turns), loop, done)
    if wide > 1:
        again.set_metadata("llvm.loop", _one_turn_at_a_time(b.module))

    b.position_at_end(done)
    for total, pointer in zip(grown, outputs, strict=True):
        store(b, total, pointer)
    next_tile = b.add(t, number(wide))
    t.add_incoming(number(0), before)
    t.add_incoming(next_tile, done)
    b.cbranch(b.icmp_signed("<", next_tile, tiles), begin, after)


def _sum_of_products(
    most: int,
    *,
    wide: int = 1,
    beside: bool = False,
    indexed: bool = False,
    fetches: bool = False,
    adds: bool = False,
    halves: bool = False,
) -> Any:
    """out[r, :16] = sum over i < n of x[r, i] * w[i, :16], in the order of i, summed in registers, r < rows.

    x[r] begins at x + r * ldx, out[r] at out + r * ldo, w[i] at w + i * 16. n is positive, and rows is 1 to
    `most`. And so for each of `tiles` outputs of 16, a multiple of `wide`, which are computed at the same
    time: w of the next one begins `apart` words after that of the one before. What else there is:

    beside: the weights of `wide` outputs of 16 lie side by side: w[i] of the first begins at
        w + i * 16 * `wide`, that of each other 16 words after the one before. The next `wide` outputs'
        begin `wide` * `apart` words further.
    indexed: w[i] begins at w + index[i] * stride, and what is `further` words further is fetched.
    fetches: beside w[i] line i // 16 (of 16 words) is fetched of what begins at of + index[i % 16] * stride,
        for two indices.
    adds: the sum begins with what out holds. w is long, and is fetched before it is read: beside the word at
        place p of a tile that at `ahead` + `pace` p, at most two tiles further; past the end of a tile lies
        the next one.
    halves: a word is two bfloat16, as weights.py lays them out, and n is even.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        after = b.append_basic_block("all_summed")
        cases = b.switch(args[6], after)
        for rows in range(1, most + 1):
            these = b.append_basic_block(f"rows_{rows}")
            cases.add_case(ir.Constant(_I64, rows), these)
            b.position_at_end(these)
            kind = {"indexed": indexed, "fetches": fetches, "adds": adds, "halves": halves}
            _sum_rows(b, args, rows, after, wide=wide, beside=beside, **kind)
        b.position_at_end(after)
        return context.get_dummy_value()

    size = types.int64
    plain = (POINTER, size, POINTER, size, POINTER, *[size] * 4)
    if indexed:

        @intrinsic
        def gathered(
            typing: Any, x: Any, ldx: Any, w: Any, n: Any, out: Any, ldo: Any, rows: Any, tiles: Any,
            apart: Any, index: Any, stride: Any, further: Any,
        ) -> Any:  # fmt: skip
            return types.void(*plain, types.CPointer(size), size, size), generate

        return gathered
    if adds:

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


add = _sum_of_products(MOST_ROWS, adds=True)
add_to_broad = _sum_of_products(MOST_OF_BROAD, wide=BROAD, beside=BESIDE, adds=True)
add_halves = _sum_of_products(MOST_ROWS, adds=True, halves=True)
add_halves_to_broad = _sum_of_products(MOST_OF_BROAD, wide=BROAD, beside=BESIDE, adds=True, halves=True)
tile = _sum_of_products(MOST_ROWS, fetches=True)
mix = _sum_of_products(MOST_ROWS, indexed=True)

_EIGHT = ir.VectorType(_F32, 8)


def _shuffled(b: Any, one: Any, other: Any, lanes: Sequence[int]) -> Any:
    places = ir.Constant(ir.VectorType(_I32, len(lanes)), [ir.Constant(_I32, lane) for lane in lanes])
    return b.shuffle_vector(one, other, places)


def _turned(b: Any, rows: Sequence[Any]) -> list[Any]:
    """The columns of eight vectors of eight: at each step half as far apart, they swap their halves."""
    vectors = list(rows)
    for far in (4, 2, 1):
        low = [lane if not lane & far else lane - far + 8 for lane in range(8)]
        high = [lane + far if not lane & far else lane + 8 for lane in range(8)]
        for i in range(8):
            if not i & far:
                one, other = vectors[i], vectors[i + far]
                vectors[i], vectors[i + far] = (_shuffled(b, one, other, lanes) for lanes in (low, high))
    return vectors


@intrinsic
def turn(typing: Any, entries: Any, slots: Any, width: Any, out: Any) -> Any:
    """out[d * 16 + i] = entries[slots[i] * width + d] for i < 16 and d < 8."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        entries, slots, width, out = args

        def row(i: int) -> Any:
            slot = b.load(b.gep(slots, [ir.Constant(_I64, i)]))
            value = b.load(b.bitcast(b.gep(entries, [b.mul(slot, width)]), _EIGHT.as_pointer()))
            value.align = 4
            return value

        for half in range(0, LANES, 8):
            for d, column in enumerate(_turned(b, [row(half + i) for i in range(8)])):
                pointer = b.gep(out, [ir.Constant(_I64, d * LANES + half)])
                b.store(column, b.bitcast(pointer, _EIGHT.as_pointer())).align = 4
        return context.get_dummy_value()

    size = types.int64
    return types.void(POINTER, types.CPointer(types.int64), size, POINTER), generate


@intrinsic
def largest_of_tiles(typing: Any, numbers: Any, tiles: Any) -> Any:
    """The largest of 16 * tiles numbers, NaN left out unless it comes first; tiles is positive."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        numbers, tiles = args
        before, loop, done = b.basic_block, b.append_basic_block("most"), b.append_basic_block("found")
        first = load(b, numbers)
        b.branch(loop)

        b.position_at_end(loop)
        i, most = b.phi(_I64), b.phi(_VECTOR)
        these = load(b, b.gep(numbers, [b.mul(i, ir.Constant(_I64, LANES))]))
        larger = b.select(b.fcmp_ordered(">", these, most), these, most)
        following = b.add(i, ir.Constant(_I64, 1))
        for phi, start, value in ((i, ir.Constant(_I64, 0), following), (most, first, larger)):
            phi.add_incoming(start, before)
            phi.add_incoming(value, loop)
        b.cbranch(b.icmp_signed("<", following, tiles), loop, done)

        b.position_at_end(done)
        width, vector = LANES, larger
        while width > 1:
            width //= 2
            low, high = (_shuffled(b, vector, vector, range(at, at + width)) for at in (0, width))
            vector = b.select(b.fcmp_ordered(">", high, low), high, low)
        return b.extract_element(vector, ir.Constant(_I32, 0))

    return types.float32(POINTER, types.int64), generate
