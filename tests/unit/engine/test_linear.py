"""Products of few rows: joined and packed they equal the modules'."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.engine.backends.linear import Linear, NormedLinear, can_pack


def layers(widths: list[int], *, bias: bool) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(24, width, bias=bias).requires_grad_(False) for width in widths]


@pytest.mark.parametrize("rows", [1, 2, 5, 40])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("pack", [False, True])
def test_joined_products_equal_the_modules_side_by_side(rows: int, bias: bool, pack: bool) -> None:
    modules = layers([8, 16, 3], bias=bias)
    x = torch.randn(rows, 24)
    expected = torch.cat([m(x) for m in modules], dim=1)
    joined = Linear.joined(modules)
    product = joined.packed() if pack else joined
    torch.testing.assert_close(product(x), expected)
    assert product(x).is_contiguous()


@pytest.mark.parametrize("pack", [False, True])
def test_the_norm_is_applied_first(pack: bool) -> None:
    """Against the formula in float64; one row is so short that epsilon counts."""
    (module,) = layers([16], bias=True)
    gain, epsilon = torch.randn(24), 1e-3
    x = torch.randn(4, 24) * torch.tensor([[1.0], [100.0], [1e-2], [0.0]])
    weight, bias = module.weight.clone(), module.bias.clone()
    product = NormedLinear(gain, epsilon, Linear.joined([module]))
    actual = (product.packed() if pack else product)(x)
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt() * gain
    expected = normed @ weight.double().T + bias
    torch.testing.assert_close(actual, expected.float(), atol=1e-5, rtol=1e-5)


def test_packing_can_reorder_the_results() -> None:
    modules = layers([8], bias=True)
    order = torch.randperm(8)
    x = torch.randn(3, 24)
    expected = modules[0](x)[:, order]
    torch.testing.assert_close(Linear.joined(modules).packed(order)(x), expected)


def test_only_float32_on_a_cpu_is_packed() -> None:
    """The parameters stay where nothing is packed."""
    module = layers([8], bias=False)[0].to(torch.bfloat16)
    plain = Linear.joined([module])
    assert not can_pack(module.weight)
    assert plain.packed() is plain
    assert module.weight.shape == (8, 24)
