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
    matrix_unit.split(address_of(x, 0), address_of(out, 0))


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
    for words in (1, 7, 100_000):
        assert weights.aligned(words).ctypes.data % 64 == 0
        assert len(weights.aligned(words)) == words


def product(x: Floats, w: Floats, before: Floats, rows: slice) -> Floats:
    """before + x w of some rows, by `matrix_product`, with room between rows as the pass leaves it."""
    n, width = w.shape
    words = weights._tiles(torch.from_numpy(np.ascontiguousarray(w.T)), products.FOR_UNIT)
    some, out = np.pad(x[rows], ((0, 0), (0, 3))), np.pad(before[rows], ((0, 0), (0, 5)))
    work = weights.aligned(products.work_of_product(products.FOR_UNIT, n)).view(np.float32)
    work[:] = np.nan  # what rows leave there is no part of others
    end = products.matrix_product(
        some.reshape(-1),
        n + 3,
        words,
        products.FOR_UNIT,
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
