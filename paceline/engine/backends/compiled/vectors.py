"""Vector operations that numba cannot express, written as LLVM instructions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES: Final = 16
"""Numbers in a vector: two AVX registers, one AVX-512 register, four of NEON."""

F32 = ir.FloatType()
I32 = ir.IntType(32)
I64 = ir.IntType(64)
VECTOR = ir.VectorType(F32, LANES)
WORDS = ir.VectorType(I32, LANES)
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
    """Prefetch the cache line at an address."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        prefetch(b, args[0], 2)
        return context.get_dummy_value()

    return types.void(POINTER), generate


@intrinsic
def exp(typing: Any, x: Any) -> Any:
    """e^x for x <= 0 within two units in the last place; NaN for NaN. Loops can vectorise it.

    Reduced by Cody and Waite to e^r 2^n with |r| <= ln(2) / 2; the polynomial is that of Cephes' expf.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(F32, [F32] * 3)
        multiply_add = cgutils.get_or_insert_function(b.module, kind, "llvm.fma.f32")

        def number(value: float) -> Any:
            return ir.Constant(F32, float(np.float32(value)))

        def fma(one: Any, other: Any, addend: Any) -> Any:
            return b.call(multiply_add, [one, other, addend])

        # Below this, 2^n would leave the range of normal numbers. Ordered comparison is false for NaN, which
        # stays.
        low = b.fcmp_ordered("<", args[0], number(-87.0))
        x = b.select(low, number(-87.0), args[0])
        # Adding 1.5 * 2^23 rounds to an integer, which then is in the low bits.
        rounder = number(12582912.0)
        shifted = fma(x, number(1.44269504), rounder)
        n = b.fsub(shifted, rounder)
        r = fma(n, number(-0.693359375), x)
        r = fma(n, number(2.12194440e-4), r)
        p = number(1.9875691500e-4)
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1, 1):
            p = fma(p, r, number(c))
        exponent = b.add(b.bitcast(shifted, I32), ir.Constant(I32, 127))
        return b.fmul(p, b.bitcast(b.shl(exponent, ir.Constant(I32, 23)), F32))

    return types.float32(types.float32), generate


def load(b: Any, pointer: Any, kind: Any = VECTOR) -> Any:
    value = b.load(b.bitcast(pointer, kind.as_pointer()))
    value.align = 4
    return value


def store(b: Any, value: Any, pointer: Any) -> None:
    b.store(value, b.bitcast(pointer, value.type.as_pointer())).align = 4


def spread(b: Any, scalar: Any) -> Any:
    """A number in every lane."""
    undefined = ir.Constant(VECTOR, ir.Undefined)
    one = b.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(one, undefined, ir.Constant(WORDS, None))


def multiply_add(b: Any) -> Any:
    """The fused multiply-add of vectors, rounded once."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    return cgutils.get_or_insert_function(b.module, kind, f"llvm.fma.v{LANES}f32")


def prefetch(b: Any, pointer: Any, nearness: int) -> None:
    """Prefetch an address into the nearest cache (3) or the next one (2)."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    fetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    read, data = ir.Constant(I32, 0), ir.Constant(I32, 1)
    b.call(fetch, [b.bitcast(pointer, byte), read, ir.Constant(I32, nearness), data])


_EIGHT = ir.VectorType(F32, 8)


def _shuffled(b: Any, one: Any, other: Any, lanes: Sequence[int]) -> Any:
    places = ir.Constant(ir.VectorType(I32, len(lanes)), [ir.Constant(I32, lane) for lane in lanes])
    return b.shuffle_vector(one, other, places)


def _turned(b: Any, rows: Sequence[Any]) -> list[Any]:
    """Transpose eight vectors of eight: each step swaps halves at half the previous distance."""
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
            slot = b.load(b.gep(slots, [ir.Constant(I64, i)]))
            value = b.load(b.bitcast(b.gep(entries, [b.mul(slot, width)]), _EIGHT.as_pointer()))
            value.align = 4
            return value

        for half in range(0, LANES, 8):
            for d, column in enumerate(_turned(b, [row(half + i) for i in range(8)])):
                pointer = b.gep(out, [ir.Constant(I64, d * LANES + half)])
                b.store(column, b.bitcast(pointer, _EIGHT.as_pointer())).align = 4
        return context.get_dummy_value()

    size = types.int64
    return types.void(POINTER, types.CPointer(types.int64), size, POINTER), generate


@intrinsic
def largest_of_tiles(typing: Any, numbers: Any, tiles: Any) -> Any:
    """The maximum of 16 * tiles numbers, ignoring NaN unless it comes first; tiles is positive."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        numbers, tiles = args
        before, loop, done = b.basic_block, b.append_basic_block("most"), b.append_basic_block("found")
        first = load(b, numbers)
        b.branch(loop)

        b.position_at_end(loop)
        i, most = b.phi(I64), b.phi(VECTOR)
        these = load(b, b.gep(numbers, [b.mul(i, ir.Constant(I64, LANES))]))
        larger = b.select(b.fcmp_ordered(">", these, most), these, most)
        following = b.add(i, ir.Constant(I64, 1))
        for phi, start, value in ((i, ir.Constant(I64, 0), following), (most, first, larger)):
            phi.add_incoming(start, before)
            phi.add_incoming(value, loop)
        b.cbranch(b.icmp_signed("<", following, tiles), loop, done)

        b.position_at_end(done)
        width, vector = LANES, larger
        while width > 1:
            width //= 2
            low, high = (_shuffled(b, vector, vector, range(at, at + width)) for at in (0, width))
            vector = b.select(b.fcmp_ordered(">", high, low), high, low)
        return b.extract_element(vector, ir.Constant(I32, 0))

    return types.float32(POINTER, types.int64), generate
