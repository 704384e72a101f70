"""A kernel that stores the uniforms which the product's kernels keep in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.decoding.cuda.gumbel_kernels import TILE, uniforms_of


@triton.jit
def _store(seed, position, start, out, TILE: tl.constexpr):  # noqa: N803
    values = uniforms_of(tl.load(seed), tl.load(position), tl.load(start), TILE)
    tl.store(out + tl.arange(0, TILE), values)


def stored_uniforms(seed: Tensor, position: Tensor, start: Tensor) -> Tensor:
    """float64 [TILE]; arguments int64 [1] on the device."""
    out = torch.empty(TILE, dtype=torch.float64, device=seed.device)
    with torch.cuda.device_of(seed):
        _store[(1,)](seed, position, start, out, TILE=TILE)
    return out
