"""Matrix products of a decoder's step: few rows, the same weights every time.

The BLAS behind `F.linear` is optimised for square matrices: on a CPU, 5 rows take up to twice as long as one
row. oneDNN's kernels over prepacked weights read each weight once for any number of rows, so verifying a
proposal costs little more than decoding one token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_SMALL_BYTES: Final = 4 * 2**20
"""Weights up to this size are kept in a second layout for single rows, for which the call to oneDNN takes as
long as the product."""


class Product(Protocol):
    """x [R, in] -> [R, out]."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """A new tensor, which the caller may modify."""

    def packed(self, order: Tensor | None = None) -> Product:
        """The same product from weights prepacked by oneDNN; the product itself if `can_pack` is False.

        `order` reorders the results. Model parameters that hold the weights are emptied, so that nothing is
        held twice.
        """


class Linear:
    """x W^T + b on any device, in any dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, owners: Sequence[Any] = ()) -> None:
        """`owners`: the parameters that share `weight`, emptied when it is packed."""
        self.weight = weight
        self.bias = bias
        self.owners = tuple(owners)

    @classmethod
    def joined(cls, modules: Sequence[Any]) -> Linear:
        """One product for `nn.Linear`s of the same input; their parameters become views of its weight.

        Either all of them have a bias or none.
        """
        weights = [m.weight for m in modules]
        bias = None if modules[0].bias is None else _join([m.bias for m in modules])
        return cls(_join(weights), bias, weights)

    def __call__(self, x: Tensor, /) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def packed(self, order: Tensor | None = None) -> Product:
        """See `Product`."""
        if not can_pack(self.weight):
            return self
        weight = self.weight if order is None else self.weight[order]
        bias = self.bias if order is None or self.bias is None else self.bias[order]
        for parameter in self.owners:
            parameter.data = parameter.data.new_empty(0)
        return _Packed(weight, bias)


class NormedLinear:
    """An RMS norm and the product that follows it."""

    def __init__(self, gain: Tensor, epsilon: float, linear: Linear) -> None:
        self._gain = gain
        self._shape = (len(gain),)
        self._epsilon = epsilon
        self._linear = linear

    def __call__(self, x: Tensor, /) -> Tensor:
        return self._linear(F.rms_norm(x, self._shape, self._gain, self._epsilon))

    def packed(self, order: Tensor | None = None) -> Product:
        """See `Product`; the packed weights include the norm's gain."""
        linear, n = self._linear, len(self._gain)
        if not can_pack(linear.weight):
            return self
        scaled = Linear(linear.weight * (self._gain * math.sqrt(n)), linear.bias, linear.owners)
        return _PackedNormed(n * self._epsilon, scaled.packed(order))


class _Packed:
    """`Linear` in oneDNN's layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        # Without an expected number of rows, oneDNN chooses a layout for any number.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._bias = bias
        self._run = torch.ops.mkldnn._linear_pointwise.default
        small = weight.numel() * weight.itemsize <= _SMALL_BYTES
        self._columns = weight.t().contiguous() if small else None

    def __call__(self, x: Tensor, /) -> Tensor:
        if self._columns is not None and x.shape[0] == 1:
            if self._bias is None:
                return torch.mm(x, self._columns)
            return torch.addmm(self._bias, x, self._columns)
        result: Tensor = self._run(x, self._weight, self._bias, "none", [], "")
        return result

    def packed(self, order: Tensor | None = None) -> Product:
        """Returns itself: it is already packed, and in its order."""
        assert order is None
        return self


class _PackedNormed:
    """x / sqrt(x·x + n epsilon) in three operations instead of the six of `F.rms_norm`, then the product."""

    def __init__(self, floor: float, product: Product) -> None:
        self._root_floor = torch.tensor(math.sqrt(floor))
        self._product = product

    def __call__(self, x: Tensor, /) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return self._product(x / torch.hypot(length, self._root_floor))

    def packed(self, order: Tensor | None = None) -> Product:
        """Returns itself: it is already packed, and in its order."""
        assert order is None
        return self


def can_pack(weight: Tensor) -> bool:
    """True if oneDNN's packed products serve the weight: float32 on a CPU."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def _join(parameters: Sequence[Any]) -> Tensor:
    if len(parameters) == 1:
        whole: Tensor = parameters[0].data
        return whole
    whole = torch.cat([p.data for p in parameters])
    for parameter, part in zip(parameters, torch.split(whole, [len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole
