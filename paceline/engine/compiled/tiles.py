"""Sums of products in registers, written as LLVM instructions: what numba has no words for.

Each sum is taken in one order, whatever else is computed beside it. numba's cache of compiled functions does
not look at this file: after a change here, touch kernels.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES: Final = 16
"""Outputs of a tile: two AVX registers, one AVX-512 register, four of NEON."""
MOST_ROWS: Final = 6
"""Rows that share one read of a tile: with two accumulators each they fill the registers of AVX."""

_AHEAD: Final = 1024
"""Weights are fetched so many numbers ahead: a processor's own prefetching stops at every page."""

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_VECTOR = ir.VectorType(_F32, LANES)
_POINTER = types.CPointer(types.float32)


@intrinsic
def address_of(typing: Any, array: Any, index: Any) -> Any:
    """The address of a flat array's element."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, b, args[0]).data
        return b.gep(data, [args[1]])

    return types.CPointer(array.dtype)(array, types.int64), generate


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


def _load(b: Any, pointer: Any) -> Any:
    value = b.load(b.bitcast(pointer, _VECTOR.as_pointer()))
    value.align = 4
    return value


def _store(b: Any, value: Any, pointer: Any) -> None:
    b.store(value, b.bitcast(pointer, _VECTOR.as_pointer())).align = 4


def _prefetch(b: Any, pointer: Any) -> None:
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
    fetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    b.call(
        fetch, [b.bitcast(pointer, byte), ir.Constant(_I32, 0), ir.Constant(_I32, 3), ir.Constant(_I32, 1)]
    )


def _spread(b: Any, scalar: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    one = b.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return b.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(_I32, LANES), None))


def _sum_of_products(rows: int, *, indexed: bool) -> Any:
    """out[r, :16] += sum over i < n of x[r, i] * w[i, :16], in the order of i, summed in registers.

    x[r] begins at x + r * ldx, out[r] at out + r * ldo, w[i] at w + i * 16; with an index, w[i] begins at
    w + index[i] * stride.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, ldx, w, n, out, ldo = args[:6]
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        fma = cgutils.get_or_insert_function(b.module, kind, f"llvm.fma.v{LANES}f32")
        inputs = [b.gep(x, [b.mul(ldx, ir.Constant(_I64, r))]) for r in range(rows)]
        outputs = [b.gep(out, [b.mul(ldo, ir.Constant(_I64, r))]) for r in range(rows)]
        starts = [_load(b, pointer) for pointer in outputs]
        before, loop, done = b.basic_block, b.append_basic_block("sum"), b.append_basic_block("summed")
        b.cbranch(b.icmp_signed(">", n, ir.Constant(_I64, 0)), loop, done)

        b.position_at_end(loop)
        i = b.phi(_I64)
        sums = [b.phi(_VECTOR) for _ in range(rows)]
        place = b.mul(i, ir.Constant(_I64, LANES))
        if indexed:
            place = b.mul(b.load(b.gep(args[6], [i])), args[7])
        weights = _load(b, b.gep(w, [place]))
        if not indexed:
            _prefetch(b, b.gep(w, [b.add(place, ir.Constant(_I64, _AHEAD))]))
        grown = [
            b.call(fma, [_spread(b, b.load(b.gep(row, [i]))), weights, total])
            for row, total in zip(inputs, sums, strict=True)
        ]
        following = b.add(i, ir.Constant(_I64, 1))
        for phi, start, value in zip(
            [i, *sums], [ir.Constant(_I64, 0), *starts], [following, *grown], strict=True
        ):
            phi.add_incoming(start, before)
            phi.add_incoming(value, loop)
        b.cbranch(b.icmp_signed("<", following, n), loop, done)

        b.position_at_end(done)
        totals = [b.phi(_VECTOR) for _ in range(rows)]
        for total, start, value in zip(totals, starts, grown, strict=True):
            total.add_incoming(start, before)
            total.add_incoming(value, loop)
        for total, pointer in zip(totals, outputs, strict=True):
            _store(b, total, pointer)
        return context.get_dummy_value()

    size, index = types.int64, types.CPointer(types.int64)
    plain = (_POINTER, size, _POINTER, size, _POINTER, size)
    if indexed:

        @intrinsic
        def gathered(
            typing: Any, x: Any, ldx: Any, w: Any, n: Any, out: Any, ldo: Any, at: Any, by: Any
        ) -> Any:
            return types.void(*plain, index, size), generate

        return gathered

    @intrinsic
    def tiled(typing: Any, x: Any, ldx: Any, w: Any, n: Any, out: Any, ldo: Any) -> Any:
        return types.void(*plain), generate

    return tiled


tile_1, tile_2, tile_3, tile_4, tile_5, tile_6 = (
    _sum_of_products(rows, indexed=False) for rows in range(1, MOST_ROWS + 1)
)
mix_1, mix_2, mix_3, mix_4 = (_sum_of_products(rows, indexed=True) for rows in (1, 2, 3, 4))


def _shuffled(b: Any, one: Any, other: Any, lanes: Sequence[int]) -> Any:
    places = ir.Constant(ir.VectorType(_I32, len(lanes)), [ir.Constant(_I32, lane) for lane in lanes])
    return b.shuffle_vector(one, other, places)


def _four_sums(b: Any, vectors: Sequence[Any]) -> Any:
    """The sums of four vectors' lanes in one vector: interleaved and added, so that they share additions."""
    for half in (8, 4):
        low, high = range(half), range(half, 2 * half)
        vectors = [b.fadd(_shuffled(b, v, v, low), _shuffled(b, v, v, high)) for v in vectors]

    def joined(one: Any, other: Any, low: Sequence[int], high: Sequence[int]) -> Any:
        return b.fadd(_shuffled(b, one, other, low), _shuffled(b, one, other, high))

    pairs = [joined(*vectors[i : i + 2], (0, 4, 1, 5), (2, 6, 3, 7)) for i in (0, 2)]
    return joined(*pairs, (0, 1, 4, 5), (2, 3, 6, 7))


@intrinsic
def four_dots(typing: Any, x: Any, w: Any, tiles: Any, out: Any, ldo: Any) -> Any:
    """out[r * ldo] = sum over i < n of x[r * n + i] * w[i] for r < 4, with n = 16 * tiles."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, w, tiles, out, ldo = args
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        fma = cgutils.get_or_insert_function(b.module, kind, f"llvm.fma.v{LANES}f32")
        lanes = ir.Constant(_I64, LANES)
        n = b.mul(tiles, lanes)
        inputs = [b.gep(x, [b.mul(n, ir.Constant(_I64, r))]) for r in range(4)]
        before, loop, done = b.basic_block, b.append_basic_block("dot"), b.append_basic_block("dotted")
        b.branch(loop)

        b.position_at_end(loop)
        i = b.phi(_I64)
        sums = [b.phi(_VECTOR) for _ in inputs]
        factor = _load(b, b.gep(w, [i]))
        grown = [
            b.call(fma, [_load(b, b.gep(row, [i])), factor, total])
            for row, total in zip(inputs, sums, strict=True)
        ]
        following = b.add(i, lanes)
        starts = [ir.Constant(_I64, 0), *(ir.Constant(_VECTOR, None) for _ in sums)]
        for phi, start, value in zip([i, *sums], starts, [following, *grown], strict=True):
            phi.add_incoming(start, before)
            phi.add_incoming(value, loop)
        b.cbranch(b.icmp_signed("<", following, n), loop, done)

        b.position_at_end(done)
        totals = _four_sums(b, grown)
        for r in range(4):
            total = b.extract_element(totals, ir.Constant(_I32, r))
            b.store(total, b.gep(out, [b.mul(ldo, ir.Constant(_I64, r))]))
        return context.get_dummy_value()

    size = types.int64
    return types.void(_POINTER, _POINTER, size, _POINTER, size), generate
