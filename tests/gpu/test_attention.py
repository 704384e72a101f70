"""Attention of 16 bits by the kernels that a CUDA device chooses, against sums in float64, row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.engine.backends.cache_attention import gathered
from paceline.engine.backends.cache_attention.varlen import VarlenAttention
from paceline.engine.backends.ragged_batch import RaggedBatch
from paceline.engine.cache import LayerLayout, PagedCache
from paceline.engine.device import keep_attention_from_cudnn
from paceline.engine.layout import PassLayout, SequenceInput
from paceline.engine.loading.attention_choice import error_in_trial
from paceline.kv import BlockTable

pytestmark = pytest.mark.gpu

KV_HEADS = 2
KEYS = (33, 64, 65, 66, 96, 97, 129, 512, 513, 1025)
"""Kernels work on tiles of 32 and more keys: whole ones, and those with a key over, where they go wrong."""


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda", 0)
    keep_attention_from_cudnn(device)
    return device


def expected(cache: PagedCache, slots: Tensor, query: Tensor, start: int) -> Tensor:
    """[rows, heads, dim] of rows at positions from `start` on, in float64."""
    per_kv = query.shape[1] // KV_HEADS
    keys, values = (
        part[0][slots].double().repeat_interleave(per_kv, dim=1) for part in (cache.keys, cache.values)
    )
    scores = torch.einsum("rhd,khd->hrk", query.double(), keys) * query.shape[-1] ** -0.5
    hidden = torch.arange(len(slots)) > start + torch.arange(len(query))[:, None]
    weights = scores.masked_fill(hidden.to(scores.device), float("-inf")).softmax(-1)
    return torch.einsum("hrk,khd->rhd", weights, values)


@pytest.mark.parametrize("scattered", [False, True], ids=["in one piece", "scattered"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("per_kv", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attention_of_one_sequence_equals_the_reference(
    cuda: torch.device, dtype: torch.dtype, per_kv: int, head_dim: int, scattered: bool
) -> None:
    """Whole prompts, chunks at the end of long ones, verifications and decode steps."""
    generator = torch.Generator(cuda).manual_seed(1)
    layers = (LayerLayout(KV_HEADS, head_dim, head_dim, None),)
    for length in KEYS:
        for rows in {length, min(length, 65), 17, 5, 1}:
            cache = PagedCache(layers, num_blocks=2 * 1040, block_size=1, dtype=dtype, device=cuda)
            cache.entries[0].normal_(generator=generator)
            table, other = BlockTable(cache.pool), BlockTable(cache.pool)
            table.reserve(length - rows)
            table.commit(length - rows)
            if scattered:
                other.reserve(1)
            table.reserve(rows)
            slots = torch.tensor(table.slots(0, length), device=cuda)
            query = torch.randn(
                rows, per_kv * KV_HEADS, head_dim, generator=generator, device=cuda, dtype=dtype
            )
            batch = RaggedBatch.build(PassLayout.of_sequences([SequenceInput(table, [1] * rows, 1)]), cache)
            out = batch.attend(0, query, None).double()
            wanted = expected(cache, slots, query, length - rows)
            error = (out - wanted).norm(dim=-1) / wanted.norm(dim=-1)
            assert float(error.max()) < 0.05, (length, rows, error.amax(-1).topk(1))


@pytest.mark.parametrize("room", [1, 3 << 20])
def test_attention_with_little_copy_space_equals_the_reference(
    cuda: torch.device, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Query heads in parts of one, which is given no copy, and of several: the bits may differ."""
    monkeypatch.setattr(gathered, "_COPIED_BYTES", room)
    test_attention_of_one_sequence_equals_the_reference(cuda, torch.bfloat16, 4, 128, scattered=False)


@pytest.mark.parametrize("window", [None, 7, 300])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("per_kv", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attention_in_place_passes_its_trial(
    cuda: torch.device, dtype: torch.dtype, per_kv: int, head_dim: int, window: int | None
) -> None:
    """Against the gathered attention, which the tests above compare with sums in float64."""
    layer = LayerLayout(KV_HEADS, head_dim, head_dim, window, per_kv)
    assert error_in_trial(VarlenAttention(), [layer], dtype, cuda) is None
