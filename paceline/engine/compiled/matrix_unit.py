"""What a processor's matrix unit (AMX) computes, with sums that are as exact as float32's own.

The unit multiplies bfloat16. A float32 has 24 bits, three times as many as a bfloat16, so it is the sum of
three of them, exactly; and weights that are bfloat16 already need not be split. Every product of two
bfloat16 is a float32 number. What is rounded are sums, in float32: of each part's products over an input's
16 pairs, and of those.

Where weights are bytes (rounding.py), the unit multiplies those as well, twice as many at a time: a row
becomes whole numbers of 22 bits times a power of two, each of three digits, and no sum is rounded at all.

A row takes three rows of the unit's 16, one for each of its parts, and a group of five rows meets 16 outputs
in as many cycles as one row would: as long as memory is what a pass waits for, further rows cost nothing.
"""

from __future__ import annotations

import functools
from typing import Any, Final

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

from paceline.core.system_calls import succeeds
from paceline.engine.compiled.vectors import (
    LANES,
    POINTER,
    TO_WORDS,
    VECTOR,
    WORDS,
    load,
    multiply_add,
    spread,
    store,
)

_AS_IT_IS: Final = not any(getattr(config, name, None) for name in ("CPU_NAME", "CPU_FEATURES"))
"""numba compiles for the processor that it runs on, not for one that its variables name."""
IN_PROCESSOR: Final = _AS_IT_IS and all(
    get_host_cpu_features().get(x) for x in ("amx-tile", "amx-bf16", "amx-int8")
)
"""Whether the processor has the unit, so that code for it can be compiled; see `usable`."""
PARTS: Final = 3
"""bfloat16 that a float32 is the sum of, and digits of the whole number that it becomes beside bytes."""
ROWS: Final = 5
"""Rows of a group: their parts are rows of one tile of the unit."""
DEPTH: Final = 32
"""Inputs that meet at a time."""
BYTES_DEPTH: Final = 64
"""The same where weights are bytes."""
MOST_WHOLE: Final = 22
"""Bits of that whole number, beside its sign."""
MOST_INPUTS_IN_BYTES: Final = 2**31 // 2**14
"""Whose products with bytes no sum of 32 bits is too small for."""
BLOCK: Final = 256
"""Words of 16 outputs' weights of so many inputs: 16 rows of 64 bytes."""

_LINE: Final = 64  # bytes of a row of a tile
_PERMISSION, _TILE_DATA = 0x1023, 18  # ARCH_REQ_XCOMP_PERM of Linux' arch_prctl, and the state to be used
_ARCH_PRCTL = {"x86_64": 158}

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))


@functools.cache
def usable() -> bool:
    """Whether this process may use the unit. The system is asked once: what the unit holds has to be saved
    between threads, and Linux wants to be told who needs that."""
    return IN_PROCESSOR and succeeds(_ARCH_PRCTL, _PERMISSION, _TILE_DATA)


def _call(b: Any, name: str, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.x86.{name}"), args)


def _number(value: int, kind: Any = _I64) -> Any:
    return ir.Constant(kind, value)


def _tile(number: int) -> Any:
    return _number(number, _I8)


def _bytes_at(b: Any, pointer: Any) -> Any:
    return b.bitcast(pointer, _I8.as_pointer())


def _shape(rows: int) -> list[int]:
    """What `ldtilecfg` reads: palette, bytes of a row of each tile, rows of each."""
    shape = [1, *[0] * 63]
    for tile, count in enumerate([PARTS * rows] * 6 + [16] * 2):
        shape[16 + 2 * tile] = _LINE
        shape[48 + tile] = count
    return shape


@intrinsic
def begin(typing: Any, rows: Any) -> Any:
    """Shape the unit's eight tiles for groups of 1 to `ROWS` rows: sums and inputs have three for each; the
    last two tiles are of weights, 16 pairs of inputs each."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        shapes = [number for rows in range(1, ROWS + 1) for number in _shape(rows)]
        table = cgutils.global_constant(
            b.module, "shapes_of_tiles", cgutils.create_constant_array(_I8, shapes)
        )
        at = b.mul(b.sub(args[0], _number(1)), _number(64))
        _call(b, "ldtilecfg", b.gep(_bytes_at(b, table), [at]))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def end(typing: Any) -> Any:
    """Give up what the tiles hold: nobody need save it any more."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        _call(b, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def split(typing: Any, x: Any, scale: Any, out: Any) -> Any:
    """The parts of x[:32] as bfloat16 [3, 32] at out, the largest first; `scale` is not used.

    Each part has the upper bits of what is left, so that the differences are exact, and the last one is all
    of it. What is no number gives a part that is none.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        floats, words = ir.VectorType(ir.FloatType(), DEPTH), ir.VectorType(_I32, DEPTH)
        halves = ir.VectorType(_I16, DEPTH)
        left = load(b, args[0], floats)
        for part in range(PARTS):
            bits = b.bitcast(left, words)
            upper = b.and_(bits, ir.Constant(words, [0xFFFF0000] * DEPTH))
            half = b.trunc(b.lshr(bits, ir.Constant(words, [16] * DEPTH)), halves)
            store(b, half, b.gep(args[2], [_number(part * LANES)]))
            left = b.fsub(left, b.bitcast(upper, floats))
        return context.get_dummy_value()

    return types.void(POINTER, types.float32, POINTER), generate


@intrinsic
def digits(typing: Any, x: Any, scale: Any, out: Any) -> Any:
    """The whole numbers next to x[:64] times `scale`, in three digits to the base of 256 each, from -128 to
    127: int8 [3, 64] at out, the largest first. Numbers of more than `MOST_WHOLE` bits give any digits."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        floats, words = (ir.VectorType(kind, BYTES_DEPTH) for kind in (ir.FloatType(), _I32))
        small = ir.VectorType(_I8, BYTES_DEPTH)

        def each(number: Any, kind: Any = words) -> Any:
            return ir.Constant(kind, [number] * BYTES_DEPTH)

        scaled = b.fmul(load(b, args[0], floats), spread(b, args[1], BYTES_DEPTH))
        # Adding 1.5 * 2^23 rounds to a whole number, which the low bits are then more than the sum's own.
        bits = b.bitcast(b.fadd(scaled, each(12582912.0, floats)), words)
        # Digits from 0 to 255 of the number that is 128 more in each place, and each of them less 128.
        number = b.xor(b.add(bits, each(0x808080 - 0x4B400000)), each(0x808080))
        for part in range(PARTS):
            digit = b.trunc(b.lshr(number, each(8 * (PARTS - 1 - part))), small)
            store(b, digit, b.gep(args[2], [_number(part * LANES)]))
        return context.get_dummy_value()

    return types.void(POINTER, types.float32, POINTER), generate


def _parts_at(b: Any, sums: Any, kind: Any) -> list[Any]:
    return [load(b, b.gep(sums, [_number(part * LANES)]), kind) for part in range(PARTS)]


@intrinsic
def add_parts(typing: Any, sums: Any, unit: Any, scales: Any, out: Any) -> Any:
    """out[:16] += the three sums of a row's parts at sums [3, 16]: the two smaller ones first. `unit` and
    `scales` are not used."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        high, mid, low = _parts_at(b, args[0], VECTOR)
        store(b, b.fadd(load(b, args[3]), b.fadd(high, b.fadd(mid, low))), args[3])
        return context.get_dummy_value()

    return types.void(POINTER, types.float32, TO_WORDS, POINTER), generate


@intrinsic
def add_digits(typing: Any, sums: Any, unit: Any, scales: Any, out: Any) -> Any:
    """out[:16] += what the sums of a row's digits, int32 at sums [3, 16], stand for, times `unit` and each
    output's scale: rounded to a float32 before the scale, and once when it is added."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        doubles = ir.VectorType(ir.DoubleType(), LANES)
        base = ir.Constant(doubles, [256.0] * LANES)
        high, mid, low = (b.sitofp(total, doubles) for total in _parts_at(b, args[0], WORDS))
        # Whole numbers of less than 53 bits, so that nothing is rounded.
        total = b.fadd(b.fmul(b.fadd(b.fmul(high, base), mid), base), low)
        unit = spread(b, b.fpext(args[1], ir.DoubleType()), LANES)
        whole = b.fptrunc(b.fmul(total, unit), VECTOR)
        scale, before = load(b, args[2]), load(b, args[3])
        store(b, b.call(multiply_add(b), [whole, scale, before]), args[3])
        return context.get_dummy_value()

    return types.void(POINTER, types.float32, TO_WORDS, POINTER), generate


def _meeting(groups: int, columns: int, instruction: str) -> Any:
    """Sums of so many groups of rows with so many times 16 outputs, one or two of each.

    As an intrinsic of (a, between_groups, block, w, between_columns, blocks, out): a group's inputs are
    `blocks` blocks of `block` words from a on, 16 outputs' weights as many of `BLOCK` words from w on. The
    next group's begin so many words further, the next outputs' so many. out: 32 bits
    [groups, columns, 16, 16], whose first rows are a group's parts: three of its first row, three of the
    second one.
    """
    sums = {(g, c): g * columns + c for g in range(groups) for c in range(columns)}
    of_group, of_column = (4, 5), (6, 7)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        a, between_groups, block, w, between_columns, blocks, out = args
        before, loop = b.basic_block, b.append_basic_block("block")
        done = b.append_basic_block("summed")
        line = _number(_LINE)
        for tile in sums.values():
            _call(b, "tilezero", _tile(tile))
        b.branch(loop)

        b.position_at_end(loop)
        k = b.phi(_I64)
        k.add_incoming(_number(0), before)
        place = b.mul(k, block)
        for g in range(groups):
            at = b.gep(a, [b.add(place, b.mul(between_groups, _number(g)))])
            _call(b, "tileloadd64", _tile(of_group[g]), _bytes_at(b, at), line)
        place = b.mul(k, _number(BLOCK))
        for c in range(columns):
            at = b.gep(w, [b.add(place, b.mul(between_columns, _number(c)))])
            _call(b, "tileloadd64", _tile(of_column[c]), _bytes_at(b, at), line)
            for g in range(groups):
                _call(b, instruction, _tile(sums[g, c]), _tile(of_group[g]), _tile(of_column[c]))
        following = b.add(k, _number(1))
        k.add_incoming(following, loop)
        b.cbranch(b.icmp_signed("<", following, blocks), loop, done)

        b.position_at_end(done)
        for tile in sums.values():
            _call(b, "tilestored64", _tile(tile), _bytes_at(b, b.gep(out, [_number(tile * BLOCK)])), line)
        return context.get_dummy_value()

    size = types.int64

    @intrinsic
    def meet(
        typing: Any,
        a: Any,
        between_groups: Any,
        block: Any,
        w: Any,
        between_columns: Any,
        blocks: Any,
        out: Any,
    ) -> Any:
        return types.void(POINTER, size, size, TO_WORDS, size, size, POINTER), generate

    return meet


def meetings(instruction: str) -> tuple[Any, Any, Any, Any]:
    """One group of rows with one and with two times 16 outputs, and two groups with either."""
    one, other = ((_meeting(groups, 1, instruction), _meeting(groups, 2, instruction)) for groups in (1, 2))
    return *one, *other
