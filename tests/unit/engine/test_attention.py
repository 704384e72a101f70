"""Inputs of the attention kernels, by device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.engine.backends.cache_attention import gathered
from paceline.engine.backends.cache_attention.group import AttentionGroup
from paceline.engine.backends.ragged_batch import RaggedBatch
from paceline.engine.cache import LayerLayout, PagedCache
from paceline.engine.layout import PassLayout, SequenceInput
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
    batch = RaggedBatch.build(PassLayout.of_sequences([SequenceInput(table, [1] * rows, 1)]), cache)
    out = batch.attend(0, torch.zeros(rows, heads, HEAD_DIM, device=device), None)
    assert out.shape == (rows, heads, HEAD_DIM)
    return seen


def test_gpu_kernels_get_no_expanded_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel was seen to compute wrongly with them. The meta device stands for any GPU."""
    for part in given(monkeypatch, "meta", kv_heads=2, heads=8, rows=65):
        assert part.shape == (2, 4, 65, HEAD_DIM)
        assert part.is_contiguous()


@pytest.mark.parametrize(("device", "kv_heads"), [("cpu", 2), ("meta", 8)])
def test_keys_are_not_copied_needlessly(monkeypatch: pytest.MonkeyPatch, device: str, kv_heads: int) -> None:
    """On a CPU, and where no query heads share them."""
    for part in given(monkeypatch, device, kv_heads, heads=8, rows=65):
        assert part.untyped_storage().nbytes() == 8 * 16 * kv_heads * 2 * HEAD_DIM * 4, "the cache's own"


ONE_HEAD_EACH = 65 * 2 * 2 * HEAD_DIM * 4
"""Bytes of 65 float32 keys and values of two key-value heads."""


@pytest.mark.parametrize(
    ("room", "at_once"),
    [
        (4 * ONE_HEAD_EACH, [4]),
        (4 * ONE_HEAD_EACH - 1, [3, 1]),
        (2 * ONE_HEAD_EACH, [2, 2]),
        (2 * ONE_HEAD_EACH - 1, [1] * 4),
        (1, [1] * 4),
    ],
)
def test_gpu_copies_are_bounded(monkeypatch: pytest.MonkeyPatch, room: int, at_once: list[int]) -> None:
    """A long prompt's keys are not copied for every query head at once."""
    monkeypatch.setattr(gathered, "_COPIED_BYTES", room)
    parts = given(monkeypatch, "meta", kv_heads=2, heads=8, rows=65)
    assert [part.shape for part in parts[::2]] == [(2, n, 65, HEAD_DIM) for n in at_once]
    for part in parts:
        copied = part.untyped_storage().nbytes() != 8 * 16 * 2 * 2 * HEAD_DIM * 4
        assert copied == (part.shape[1] > 1), "one query head needs no copy"


class NoCpu(Tensor):
    """Says that it is not on a CPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("meta")


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("start", [0, 30])
def test_query_heads_in_parts_give_the_same_results(
    monkeypatch: pytest.MonkeyPatch, start: int, window: int | None, softcap: float | None
) -> None:
    generator = torch.Generator().manual_seed(1)
    cache = PagedCache((LayerLayout(2, HEAD_DIM, 12, window),), num_blocks=100, block_size=1)
    cache.entries[0].normal_(generator=generator)
    table = BlockTable(cache.pool)
    table.reserve(start)
    table.commit(start)
    table.reserve(65)
    query = torch.randn(65, 8, HEAD_DIM, generator=generator)
    batch = RaggedBatch.build(PassLayout.of_sequences([SequenceInput(table, [1] * 65, 1)]), cache)
    whole = batch.attend(0, query, None, softcap)
    entries, calls = AttentionGroup.entries, list[int]()
    sdpa = gathered._sdpa

    def spy(q: Tensor, *rest: Any) -> Tensor:
        calls.append(q.shape[1])
        return sdpa(q, *rest)

    def elsewhere(*which: Any) -> Any:
        return tuple(part.as_subclass(NoCpu) for part in entries(*which))

    monkeypatch.setattr(gathered, "_sdpa", spy)
    monkeypatch.setattr(AttentionGroup, "entries", elsewhere)
    for at_once in (4, 3, 2, 1):
        room = at_once * (start + 65) * 2 * (HEAD_DIM + 12) * 4
        monkeypatch.setattr(gathered, "_COPIED_BYTES", room)
        calls.clear()
        parts = batch.attend(0, query, None, softcap).as_subclass(Tensor)
        assert calls[0] == at_once
        assert sum(calls) == 4
        torch.testing.assert_close(parts, whole)
