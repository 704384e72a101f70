"""What the attention's kernels are given, by device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.engine.attention import LayerLayout, attend
from paceline.engine.batch import RaggedBatch, SequenceInput
from paceline.engine.cache import PagedCache
from paceline.kv import BlockTable

HEAD_DIM = 8


def given(monkeypatch: pytest.MonkeyPatch, device: str, kv_heads: int, heads: int, rows: int) -> list[Tensor]:
    """Keys and values that one chunk of a prompt is attended with."""
    seen: list[Tensor] = []
    attention = F.scaled_dot_product_attention

    def spy(query: Tensor, keys: Tensor, values: Tensor, **how: Any) -> Tensor:
        seen.extend((keys, values))
        return attention(query, keys, values, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    layers = (LayerLayout(kv_heads, HEAD_DIM, HEAD_DIM, None),)
    cache = PagedCache(layers, num_blocks=8, block_size=16, device=device)
    table = BlockTable(cache.pool)
    table.reserve(rows)
    batch = RaggedBatch.build([SequenceInput(table, [1] * rows, 1)], cache)
    out = attend(batch, 0, torch.zeros(rows, heads, HEAD_DIM, device=device), None)
    assert out.shape == (rows, heads, HEAD_DIM)
    return seen


def test_a_gpus_kernels_are_given_no_expanded_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them was seen to go wrong on those. The device without data stands for any that is no CPU."""
    for part in given(monkeypatch, "meta", kv_heads=2, heads=8, rows=65):
        assert part.shape == (2, 4, 65, HEAD_DIM)
        assert part.is_contiguous()


@pytest.mark.parametrize(("device", "kv_heads"), [("cpu", 2), ("meta", 8)])
def test_keys_are_not_copied_where_that_is_of_no_use(
    monkeypatch: pytest.MonkeyPatch, device: str, kv_heads: int
) -> None:
    """On a CPU, and where no query heads share them."""
    for part in given(monkeypatch, device, kv_heads, heads=8, rows=65):
        assert part.untyped_storage().nbytes() == 8 * 16 * kv_heads * 2 * HEAD_DIM * 4, "the cache's own"
