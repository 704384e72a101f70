"""Products by the matrix unit are the documented sums, bit for bit, for any number of rows."""

from __future__ import annotations

import ctypes
import platform
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from numba import njit

from paceline.engine.compiled import matrix_unit, products, weights
from paceline.engine.compiled.vectors import LANES, address_of
from paceline.engine.rounding import bytes_of
from tests.unit.engine.test_rounding import rounded

Floats = npt.NDArray[np.float32]

needs_unit = pytest.mark.skipif(not matrix_unit.usable(), reason="this processor has no matrix unit")


def parts_of(x: Floats) -> list[Floats]:
    """bfloat16 as float32, the largest first, whose sum is x."""
    found, left = [], x.astype(np.float32)
    for _ in range(3):
        part = (left.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        found.append(part)
        left = left - part
    return found


def fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """a b + c, rounded once: the product of two bfloat16 is exact, and so is the sum of such in float64 where
    the two are not 2^29 apart."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def documented(x: Floats, w: Floats, before: Floats) -> Floats:
    """before + x w as the unit adds: Intel's manual on TDPBF16PS, for each part.

    x: [rows, n], n a multiple of 32; w: [n, outputs], bfloat16; before: [rows, outputs].
    """
    sums = []
    for part in parts_of(x):
        total = np.zeros_like(before)
        for first in range(0, x.shape[1], 32):
            chains = [np.zeros_like(before), np.zeros_like(before)]
            for i in range(first, first + 32):
                chains[i % 2] = fused(part[:, i, None], w[i], chains[i % 2])
            total = total + (chains[0] + chains[1])
        sums.append(total)
    high, mid, low = sums
    return before + (high + (mid + low))


def bfloat16(rng: np.random.Generator, *shape: int) -> Floats:
    made = torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
    return np.asarray(made.bfloat16().float().numpy(), dtype=np.float32)


@njit
def split(x: Any, out: Any) -> None:
    matrix_unit.split(address_of(x, 0), np.float32(1), address_of(out, 0))


@njit
def digits(x: Any, scale: Any, out: Any) -> None:
    matrix_unit.digits(address_of(x, 0), scale, address_of(out, 0))


@pytest.mark.parametrize("exponent", [-100, -20, 0, 20, 127])
def test_the_parts_of_a_number_are_bfloat16_and_add_up_to_it(exponent: int) -> None:
    rng = np.random.default_rng(abs(exponent))
    x = (rng.uniform(1, 2, 32) * rng.choice([-1, 1], 32) * 2.0**exponent).astype(np.float32)
    x[:3] = np.float32(2.0**exponent) * np.array([2 - 2**-23, 1 + 2**-23, 0], dtype=np.float32)
    out = np.zeros(48, dtype=np.float32)
    split(x, out)
    parts = (out.view(np.uint16).reshape(3, 32).astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(parts.astype(np.float64).sum(axis=0), x)
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(parts, parts_of(x), strict=True))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_none(value: float) -> None:
    x, out = np.ones(32, dtype=np.float32), np.zeros(48, dtype=np.float32)
    x[5] = value
    split(x, out)
    parts = (out.view(np.uint16).reshape(3, 32).astype(np.uint32) << 16).view(np.float32)
    assert not np.isfinite(parts.sum(axis=0)[5])
    assert np.array_equal(np.delete(parts.sum(axis=0), 5), np.ones(31))


@pytest.mark.parametrize("n", [32, 80])
def test_weights_lie_as_the_unit_reads_them(n: int) -> None:
    """Tiles of 16 outputs, each in blocks of 16 pairs of inputs, filled up with zeros."""
    w = bfloat16(np.random.default_rng(n), 40, n)
    words = weights._tiles(torch.from_numpy(w), products.FOR_UNIT)
    depth = -(-n // 32) * 32
    halves = words.view(np.uint16).reshape(3, depth // 32, 16, LANES, 2).astype(np.uint32) << 16
    read = halves.view(np.float32).transpose(0, 3, 1, 2, 4).reshape(3 * LANES, depth)
    assert np.array_equal(read[:40, :n], w)
    assert not read[40:].any()
    assert not read[:, n:].any()


def test_arrays_begin_where_a_line_of_the_cache_does() -> None:
    for words in (1, 7, 100_000, 262_143):
        assert weights.aligned(words).ctypes.data % 64 == 0
        assert len(weights.aligned(words)) == words


def test_large_arrays_begin_where_a_large_page_may() -> None:
    for words in (262_144, 800_000, 3_000_000):
        assert weights.aligned(words).ctypes.data % (2 << 20) == 0
        assert len(weights.aligned(words)) == words


def product(x: Floats, w: Floats, before: Floats, rows: slice, form: int = products.FOR_UNIT) -> Floats:
    """before + x w of some rows, by `matrix_product`, with room between rows as the pass leaves it."""
    n, width = w.shape
    words = weights._tiles(torch.from_numpy(np.ascontiguousarray(w.T)), form)
    some, out = np.pad(x[rows], ((0, 0), (0, 3))), np.pad(before[rows], ((0, 0), (0, 5)))
    work = weights.aligned(products.work_of_product(form, n)).view(np.float32)
    work[:] = np.nan  # what rows leave there is no part of others
    end = products.matrix_product(
        some.reshape(-1),
        n + 3,
        words,
        form,
        0,
        n,
        width,
        out.reshape(-1),
        width + 5,
        len(some),
        work,
    )
    assert end == len(words)
    assert not out[:, width:].any()
    return np.asarray(out[:, :width], dtype=np.float32)


@needs_unit
@pytest.mark.parametrize("tiles", [1, 2, 5])
@pytest.mark.parametrize("n", [32, 112, 320])
def test_sums_are_the_documented_ones_for_any_number_of_rows(n: int, tiles: int) -> None:
    """One group of rows or two, a last one that is not full, more rows than are packed at a time; none."""
    rng = np.random.default_rng(n + tiles)
    x = rng.standard_normal((173, n), dtype=np.float32) * np.float32(10.0) ** rng.integers(-3, 3, (173, 1))
    x = x.astype(np.float32)
    w, before = bfloat16(rng, n, tiles * LANES), rng.standard_normal((173, tiles * LANES), dtype=np.float32)
    whole = -(-n // 32) * 32 - n
    expected = documented(np.pad(x, ((0, 0), (0, whole))), np.pad(w, ((0, whole), (0, 0))), before)
    exact = before + x.astype(np.float64) @ w
    assert np.abs(expected - exact).max() <= np.abs(x @ w + before - exact).max() * 2
    for rows in (0, 1, 2, 4, 5, 6, 9, 10, 11, 16, 80, 81, 173):
        for first in (0, 173 - rows):
            some = slice(first, first + rows)
            assert np.array_equal(product(x, w, before, some), expected[some]), rows


# ---- weights of 8 bits ----------------------------------------------------------------------------------


def whole_numbers(x: Floats) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """What a row is taken for: whole numbers of 22 bits, and what they are multiples of, [rows, 1]."""
    largest = np.abs(x).max(axis=1, keepdims=True).astype(np.float64)
    exponents = np.where(largest > 0, np.frexp(largest)[1], -1000)
    units = 2.0 ** (np.maximum(exponents, -100) - 22)
    return np.rint(x.astype(np.float64) / units).astype(np.int64), units


def by_whole_numbers(x: Floats, w: Floats, before: Floats) -> Floats:
    """before + x w, where each output's weights are whole numbers times a scale: all sums are exact but for
    being rounded to a float32 before they are scaled, and when they are added."""
    numbers, units = whole_numbers(x)
    bytes_, scales = bytes_of(torch.from_numpy(np.ascontiguousarray(w.T)))
    sums = ((numbers @ bytes_.numpy().astype(np.int64).T) * units).astype(np.float32)
    return (sums.astype(np.float64) * scales.numpy() + before).astype(np.float32)


@pytest.mark.parametrize("scale", [1.0, 2.0**-7])
def test_digits_are_those_of_the_next_whole_number(scale: float) -> None:
    most = 2**22
    x = np.random.default_rng(3).integers(-most, most, 64).astype(np.float32)
    x[:8] = [most, -most, 0, 127, 128, -128, -129, 32_896]
    x[8:12] = [0.5, 1.5, -0.5, 2.75]
    out = np.zeros(48, dtype=np.float32)
    digits((x / np.float32(scale)).astype(np.float32), np.float32(scale), out)
    found = out.view(np.int8).reshape(3, 64).astype(np.int64)
    assert np.array_equal(found[0] * 65536 + found[1] * 256 + found[2], np.rint(x).astype(np.int64))


@pytest.mark.parametrize("n", [64, 80])
def test_bytes_lie_as_the_unit_reads_them(n: int) -> None:
    """Tiles of 16 outputs, each in blocks of 16 times four inputs, then a scale for each."""
    w = rounded(torch.from_numpy(bfloat16(np.random.default_rng(n), 40, n)))
    words = weights._tiles(w, products.BYTES_FOR_UNIT).reshape(3, -1)
    depth = -(-n // 64) * 64
    scales = words[:, depth * LANES // 4 :].view(np.float32).reshape(3 * LANES)
    numbers = words[:, : depth * LANES // 4].copy().view(np.int8).reshape(3, depth // 4, LANES, 4)
    read = numbers.transpose(0, 2, 1, 3).reshape(3 * LANES, depth).astype(np.float32) * scales[:, None]
    assert np.array_equal(read[:40, :n], w.numpy())
    assert not read[40:].any()
    assert not read[:, n:].any()


def in_bytes(rng: np.random.Generator, n: int, width: int) -> Floats:
    """Weights [n, width] as rounding leaves them."""
    made = rounded(torch.from_numpy(rng.standard_normal((width, n), dtype=np.float32)))
    return np.ascontiguousarray(made.numpy().T)


@needs_unit
@pytest.mark.parametrize("tiles", [1, 2, 5])
@pytest.mark.parametrize("n", [64, 112, 320])
def test_sums_of_bytes_are_exact_for_any_number_of_rows(n: int, tiles: int) -> None:
    rng = np.random.default_rng(n + tiles)
    x = rng.standard_normal((173, n), dtype=np.float32) * np.float32(10.0) ** rng.integers(-3, 3, (173, 1))
    x = x.astype(np.float32)
    x[3], x[4] = 0, np.float32(1e-35)
    x[5, 7] = 1e30
    w, before = in_bytes(rng, n, tiles * LANES), rng.standard_normal((173, tiles * LANES), dtype=np.float32)
    expected = by_whole_numbers(x, w, before)
    exact = before + x.astype(np.float64) @ w
    size = np.abs(x).max(axis=1, keepdims=True)
    assert (np.abs(expected - exact) < 1e-5 * np.maximum(size, 1.0)).all(), "22 bits are enough"
    whole = product(x, w, before, slice(173), products.BYTES_FOR_UNIT)
    # A product and a sum in float64 are not always rounded as both at once are.
    np.testing.assert_allclose(whole, expected, rtol=2e-7, atol=0)
    for rows in (0, 1, 2, 4, 5, 6, 9, 10, 11, 16, 80, 81):
        for first in (0, 173 - rows):
            some = slice(first, first + rows)
            assert np.array_equal(product(x, w, before, some, products.BYTES_FOR_UNIT), whole[some]), rows


@needs_unit
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_no_numbers_gives_none_and_spoils_no_other(value: float) -> None:
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((3, 64), dtype=np.float32), in_bytes(rng, 64, 32)
    before = np.zeros((3, 32), dtype=np.float32)
    expected = product(x, w, before, slice(3), products.BYTES_FOR_UNIT)
    x[1, 9] = value
    made = product(x, w, before, slice(3), products.BYTES_FOR_UNIT)
    assert np.isnan(made[1]).all()
    assert np.array_equal(made[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize(
    ("in_unit", "inputs", "form"),
    [
        (True, 64, products.BYTES_FOR_UNIT),
        (False, 64, products.BYTES),
        (True, matrix_unit.MOST_INPUTS_IN_BYTES, products.BYTES_FOR_UNIT),
        (True, matrix_unit.MOST_INPUTS_IN_BYTES + 16, products.BYTES),
    ],
)
def test_bytes_are_for_the_unit_where_its_sums_hold(
    in_unit: bool, inputs: int, form: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest sum there may be: digits of -128 times weights of 127."""
    assert 128 * 127 * matrix_unit.MOST_INPUTS_IN_BYTES < 2**31
    monkeypatch.setattr(weights, "usable", lambda: in_unit)
    assert weights._form_of([torch.ones(1, inputs)]) == form


class _Refuses:
    def __init__(self, answer: int) -> None:
        self.answer = answer

    def __call__(self, name: object) -> Any:
        return self

    def syscall(self, *args: int) -> int:
        return self.answer


@pytest.mark.parametrize(
    ("answer", "in_processor", "system", "expected"),
    [
        (0, True, "Linux", True),
        (-1, True, "Linux", False),
        (0, False, "Linux", False),
        (0, True, "Windows", False),
    ],
)
def test_the_unit_is_used_where_it_is_and_the_system_lets_it(
    answer: int, in_processor: bool, system: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix_unit, "IN_PROCESSOR", in_processor)
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(ctypes, "CDLL", _Refuses(answer))
    assert matrix_unit.usable.__wrapped__() is expected
