"""A draft's weights rounded to 8 bits: what it proposes changes a little, what is emitted does not.

A draft's step on a CPU takes as long as reading its weights. Each output of a product keeps a scale, and its
weights are whole numbers times that. A scale is a bfloat16, so that every such product is a float32 number:
the model that is served is exactly the rounded one, whatever its weights lie in.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

MOST: Final = 127
"""The largest number; the smallest is its opposite."""


def round_products(model: Any) -> None:
    """Round the weights of all products of a model, in place. An embedding that is the head as well stays."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            numbers, scales = _rounded(module.weight.data)
            module.weight = nn.Parameter(numbers * scales[:, None], requires_grad=False)


def bytes_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [out, in] and float32 [out], whose products are the weights where they were rounded."""
    scales = _scales(weight)
    return _numbers(weight, scales).to(torch.int8), scales


def is_rounded(weight: Tensor) -> bool:
    """True where `bytes_of` loses nothing."""
    numbers, scales = bytes_of(weight)
    return torch.equal(numbers * scales[:, None], weight)


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    scales = _scales(weight).bfloat16().float()
    # Of the least numbers bfloat16 has too few digits to find them again: such rows are nothing.
    scales = torch.where(scales < torch.finfo(torch.bfloat16).tiny, 0.0, scales)
    return _numbers(weight, scales).clamp(-MOST, MOST), scales


def _scales(weight: Tensor) -> Tensor:
    """Of which each output's largest weight is `MOST` times."""
    return weight.abs().amax(dim=1) / MOST


def _numbers(weight: Tensor, scales: Tensor) -> Tensor:
    divisors = torch.where(scales > 0, scales, 1.0)
    return (weight / divisors[:, None]).round()
