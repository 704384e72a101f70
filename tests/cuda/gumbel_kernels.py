"""Kernels of coupled noise as operations of the pretended device: one launch a call, the CPU's numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.decoding.noise import gumbel


@torch.library.custom_op("pretended::add_noise", mutates_args=())
def add_noise(
    logits: Tensor, divisors: Tensor | None, noisy: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """logits / divisors + noise, float64 [R, V]."""
    sums = logits.double() if divisors is None else logits.double() / divisors[:, None]
    keys = [seed % 2**64 for seed in seeds.tolist()]
    return sums + gumbel(keys, positions.tolist(), logits.shape[1]) * noisy[:, None]


@torch.library.custom_op("pretended::choose", mutates_args=())
def choose(
    logits: Tensor, divisors: Tensor | None, noisy: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """The best token of every row, and its value."""
    best = add_noise(logits, divisors, noisy, seeds, positions).nan_to_num(nan=-torch.inf).max(-1)
    return best.indices.where(best.values > -torch.inf, -1), best.values.clone()
