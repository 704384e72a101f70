"""The cache's tensors and its size."""

from __future__ import annotations

import pytest
import torch

from paceline.core.errors import InvalidArgumentError
from paceline.engine.cache import (
    LayerLayout,
    PagedCache,
    bytes_per_block,
    default_memory_bytes,
    num_blocks_for,
)
from paceline.kv import CopyBlock

LAYERS = (LayerLayout(2, 8, 4, None), LayerLayout(1, 16, 16, 7))


def test_every_layer_has_its_own_shape() -> None:
    cache = PagedCache(LAYERS, num_blocks=3, block_size=4, dtype=torch.bfloat16)
    assert [tuple(k.shape) for k in cache.keys] == [(12, 2, 8), (12, 1, 16)]
    assert [tuple(v.shape) for v in cache.values] == [(12, 2, 4), (12, 1, 16)]
    assert cache.windows == [None, 7]
    assert (cache.num_blocks, cache.block_size) == (3, 4)
    total = sum(t.numel() * t.element_size() for t in (*cache.keys, *cache.values))
    assert cache.bytes_per_block * 3 == total


def test_copies_move_whole_blocks_in_order() -> None:
    cache = PagedCache(LAYERS, num_blocks=3, block_size=2)
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(torch.randn_like(tensor))
    before = [t.clone() for t in (*cache.keys, *cache.values)]
    cache.apply([CopyBlock(0, 2), CopyBlock(1, 0)])
    for old, new in zip(before, (*cache.keys, *cache.values), strict=True):
        assert torch.equal(new, torch.cat([old[2:4], old[2:4], old[0:2]]))


def test_the_number_of_fitting_blocks_is_computed() -> None:
    block = bytes_per_block(LAYERS, 16, torch.float32)
    assert block == 16 * (2 * 12 + 32) * 4
    assert num_blocks_for(block * 5 + 1, LAYERS, 16, torch.float32) == 5
    with pytest.raises(InvalidArgumentError, match="hold no block") as refused:
        num_blocks_for(block - 1, LAYERS, 16, torch.float32)
    assert refused.value.field == "num_blocks"


def test_free_memory_is_known() -> None:
    assert default_memory_bytes() > 1024 * 1024
