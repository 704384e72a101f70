"""Coupled noise in Triton: made in registers, added to scores and compared, without a copy in memory.

The uniforms have the bits of noise.py. A program takes one part of one row, tile by tile. A tile in which no
token is allowed makes no noise, and neither does one that cannot beat the best token found before it.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.decoding.noise import Purpose

TILE: Final = 1024
"""Tokens computed at once by a program."""
PART: Final = 8 * TILE
"""Tokens of a row that a program takes. The best of several parts are compared by a second kernel."""

_PER_ROW: Final = ["divisors", "noisy", "seeds", "positions"]
"""Arguments of one number a row. Their addresses are any, and a kernel is not compiled anew for those."""
_COUPLED: tl.constexpr = tl.constexpr(int(Purpose.COUPLED))
_HIGHEST: tl.constexpr = tl.constexpr(37.0)  # above -log(-log(u)) of the largest u: 36.74 for 1 - 2^-53


@triton.jit
def uniforms_of(seed, position, start, TILE: tl.constexpr):  # noqa: N803
    """float64 [TILE]: the coupled uniforms of the tokens from `start` on, a multiple of 4."""
    # Four tokens share a block of the generator. The counter is 1 at the first block.
    block = (start // 4 + 1 + tl.arange(0, TILE // 4)).to(tl.uint64)
    zero = tl.full((TILE // 4,), 0, tl.uint64)
    purpose = tl.full((TILE // 4,), _COUPLED, tl.uint64)
    w0, w1, w2, w3 = tl.philox_impl(
        block, zero + position.to(tl.uint64), zero, zero, zero + seed.to(tl.uint64), purpose
    )
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (TILE,))
    return ((words >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52


@triton.jit
def _scores_of(logits, stride, vocabulary, divisors, r, start, TILE: tl.constexpr):  # noqa: N803
    """float64 [TILE]: logits / divisor, -inf behind the vocabulary and for what is not a number."""
    token = start + tl.arange(0, TILE)
    row = logits + r * stride
    score = tl.load(row + token, mask=token < vocabulary, other=-float("inf")).to(tl.float64)
    if divisors is not None:
        score /= tl.load(divisors + r)
    return tl.where(score == score, score, -float("inf"))  # noqa: PLR0124


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def _choose_part(
    logits, stride, vocabulary, divisors, noisy, seeds, positions, values, tokens,
    TILE: tl.constexpr, PART: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """The best token of one part of one row and its value; -1 and -inf if none is allowed."""
    r, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_noisy, seed, position = tl.load(noisy + r) != 0, tl.load(seeds + r), tl.load(positions + r)
    best, chosen = tl.full((), -float("inf"), tl.float64), tl.full((), -1, tl.int64)
    for start in range(part * PART, min(part * PART + PART, vocabulary), TILE):
        sums = _scores_of(logits, stride, vocabulary, divisors, r, start, TILE)
        # A tile that can only equal the best loses to it: the best has a lower id.
        if tl.max(sums, 0) + tl.where(is_noisy, _HIGHEST, 0.0) > best:
            if is_noisy:
                sums -= tl.log(-tl.log(uniforms_of(seed, position, start, TILE)))
            value, at = tl.max(sums, 0, return_indices=True, return_indices_tie_break_left=True)
            if value > best:
                best, chosen = value, start + at.to(tl.int64)
    place = r * tl.num_programs(1) + part
    tl.store(values + place, best)
    tl.store(tokens + place, chosen)


@triton.jit(do_not_specialize=["parts"])
def _choose_among_parts(values, tokens, parts, best, chosen, PARTS: tl.constexpr):  # noqa: N803
    """The best of a row's parts, the first among equals, which has the lowest tokens."""
    r, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    found = tl.load(values + r * parts + part, mask=part < parts, other=-float("inf"))
    value, at = tl.max(found, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + r, value)
    tl.store(chosen + r, tl.load(tokens + r * parts + at))


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def _add_noise(
    logits, stride, vocabulary, divisors, noisy, seeds, positions, sums, TILE: tl.constexpr  # noqa: N803
):  # fmt: skip
    """One tile of logits / divisor + noise, float64."""
    r, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE
    value = _scores_of(logits, stride, vocabulary, divisors, r, start, TILE)
    if (tl.load(noisy + r) != 0) & (tl.max(value, 0) > -float("inf")):
        seed, position = tl.load(seeds + r), tl.load(positions + r)
        value -= tl.log(-tl.log(uniforms_of(seed, position, start, TILE)))
    token = start + tl.arange(0, TILE)
    tl.store(sums + r * vocabulary + token, value, mask=token < vocabulary)


def choose(
    logits: Tensor, divisors: Tensor | None, noisy: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """The token with the highest logit / divisor + noise in every row.

    Neither waits for the device nor copies to it.

    Args:
        logits: float32 [R, V], each row in one piece; -inf for filtered tokens.
        divisors: float64 [R], above 0; None divides nothing.
        noisy: int64 [R], not 0 where noise is added.
        seeds, positions: int64 [R]: as for `noise.gumbel_of`.

    Returns:
        Tokens, int64 [R], the lowest id among equals, and their values, float64 [R]; -1 and -inf for a row
        without an allowed token. What is not a number counts as filtered.
    """
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, PART)
    assert logits.stride(1) == 1 or vocabulary == 1
    values, tokens = _new(logits, rows, parts, torch.float64), _new(logits, rows, parts, torch.int64)
    with torch.cuda.device_of(logits):
        _choose_part[(rows, parts)](
            logits, logits.stride(0), vocabulary, divisors, noisy, seeds, positions, values, tokens,
            TILE=TILE, PART=PART, enable_fp_fusion=False,
        )  # fmt: skip
        if parts == 1:
            return tokens[:, 0], values[:, 0]
        best, chosen = _new(logits, rows, 1, torch.float64), _new(logits, rows, 1, torch.int64)
        _choose_among_parts[(rows,)](values, tokens, parts, best, chosen, PARTS=triton.next_power_of_2(parts))
    return chosen[:, 0], best[:, 0]


def add_noise(
    logits: Tensor, divisors: Tensor | None, noisy: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """logits / divisors + noise, float64 [R, V]; arguments as for `choose`."""
    rows, vocabulary = logits.shape
    assert logits.stride(1) == 1 or vocabulary == 1
    sums = _new(logits, rows, vocabulary, torch.float64)
    with torch.cuda.device_of(logits):
        _add_noise[(rows, triton.cdiv(vocabulary, TILE))](
            logits, logits.stride(0), vocabulary, divisors, noisy, seeds, positions, sums,
            TILE=TILE, enable_fp_fusion=False,
        )  # fmt: skip
    return sums


def _new(like: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.empty((rows, columns), dtype=dtype, device=like.device)
