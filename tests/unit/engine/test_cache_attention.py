"""Attention in place against the gathered one, by a stand-in for its kernel, and the choice between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.core.errors import InternalError, InvalidArgumentError
from paceline.engine.backends.cache_attention.gathered import GATHERED
from paceline.engine.backends.cache_attention.interface import CacheAttention
from paceline.engine.backends.cache_attention.varlen import VarlenAttention, reason_against
from paceline.engine.backends.captured.buckets import Bucket
from paceline.engine.backends.captured.static_inputs import StaticInputs
from paceline.engine.backends.ragged_batch import RaggedBatch
from paceline.engine.cache import LayerLayout, PagedCache
from paceline.engine.layout import PassLayout, SequenceInput
from paceline.engine.loading.attention_choice import choose_attention, error_in_trial
from paceline.kv import BlockTable
from tests.unit.engine.varlen_kernel import kernel_on_cpu

HEAD_DIM = 16
KV_HEADS = 2
CPU = torch.device("cpu")
CUDA = torch.device("cuda:0")


@pytest.fixture
def splits() -> Iterator[list[int]]:
    with kernel_on_cpu(page=4) as splits:
        yield splits


class World:
    """A cache of two layers, the second with the window, and sequences whose blocks lie in turn.

    What no sequence has written is NaN.
    """

    def __init__(
        self, sequences: Sequence[tuple[int, int]], block_size: int, per_kv: int, window: int | None
    ) -> None:
        layers = [LayerLayout(KV_HEADS, HEAD_DIM, HEAD_DIM, each, per_kv) for each in (None, window)]
        num_blocks = sum(-(-n // block_size) for n, _ in sequences)
        self.cache = PagedCache(layers, num_blocks=num_blocks, block_size=block_size)
        generator = torch.Generator().manual_seed(1)
        tables = [BlockTable(self.cache.pool) for _ in sequences]
        for start in range(0, max(n for n, _ in sequences), block_size):
            for table, (length, rows) in zip(tables, sequences, strict=True):
                count = max(0, min(block_size, length - rows - start))
                table.reserve(count)
                table.commit(count)
        for entries in self.cache.entries:
            entries.fill_(torch.nan)
        for table, (length, rows) in zip(tables, sequences, strict=True):
            table.reserve(rows)
            for entries in self.cache.entries:
                entries[table.slots(0, length)] = torch.randn(length, entries.shape[1], generator=generator)
        self.layout = PassLayout.of_sequences(
            [SequenceInput(t, [1] * rows, rows) for t, (_, rows) in zip(tables, sequences, strict=True)]
        )
        rows = self.layout.rows.shape[1]
        self.query = torch.randn(rows, KV_HEADS * per_kv, HEAD_DIM, generator=generator)

    def attended(self, attention: CacheAttention) -> list[Tensor]:
        """Of both layers."""
        batch = RaggedBatch.build(self.layout, self.cache, attention)
        return [batch.attend(layer, self.query, 0.3) for layer in (0, 1)]

    def replayed(self, attention: CacheAttention, bucket: Bucket) -> list[Tensor]:
        """By a recording of a bucket, padding cut off."""
        inputs = StaticInputs(bucket, self.cache, attention)
        inputs.write(self.layout)
        batch = inputs.batch(inputs.ids, inputs.positions)
        wanted = inputs.wanted[: len(self.layout.wanted)]
        # A padding row repeats another one, so it has its query.
        source = torch.empty(len(inputs.ids), dtype=torch.int64)
        for row, s in enumerate((*self.layout.sequences, self.layout.sequences[-1])):
            if row < bucket.sequences:
                places = np.maximum(np.arange(bucket.rows) - (bucket.rows - s.count), 0)
                source[row * bucket.rows : (row + 1) * bucket.rows] = torch.from_numpy(places + s.first)
        found = [batch.attend(layer, self.query[source], 0.3) for layer in (0, 1)]
        for each in found:
            for i, j in zip(*np.triu_indices(len(source), 1), strict=True):
                assert source[i] != source[j] or torch.equal(each[i], each[j])
        return [each[wanted] for each in found]


BATCHES = {
    "a chain's step": [(9, 1)],
    "a prompt": [(30, 30)],
    "a prompt's chunk": [(41, 13)],
    "decoding": [(1, 1), (17, 1), (40, 1), (16, 1)],
    "verification": [(21, 5), (40, 5), (5, 5)],
    "mixed": [(60, 33), (12, 1), (33, 5), (3, 2)],
}


@pytest.mark.parametrize("sequences", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("block_size", [4, 16, 32])
@pytest.mark.parametrize(("per_kv", "window"), [(1, 6), (4, 6), (4, 1), (4, 1000)])
def test_attention_in_place_equals_the_gathered_one(
    splits: list[int], sequences: list[tuple[int, int]], block_size: int, per_kv: int, window: int
) -> None:
    world = World(sequences, block_size, per_kv, window)
    found, right = world.attended(VarlenAttention(block_size)), world.attended(GATHERED)
    for mine, reference in zip(found, right, strict=True):
        torch.testing.assert_close(mine, reference)
    assert len(splits) == 2


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize(("per_kv", "window"), [(1, 6), (4, 6)])
@pytest.mark.parametrize(
    ("sequences", "bucket"),
    [
        ([(9, 1)], Bucket(1, 1, 64)),
        ([(9, 1), (40, 1), (1, 1)], Bucket(4, 1, 64)),
        ([(9, 4), (40, 5), (1, 1)], Bucket(4, 5, 64)),
        ([(2, 2)], Bucket(1, 9, 64)),
    ],
    ids=["one row", "rows", "padded rows", "more rows than entries"],
)
def test_recorded_attention_in_place_equals_the_gathered_one(
    splits: list[int],
    sequences: list[tuple[int, int]],
    bucket: Bucket,
    block_size: int,
    per_kv: int,
    window: int,
) -> None:
    world = World(sequences, block_size, per_kv, window)
    right = world.attended(GATHERED)
    for attention in (VarlenAttention(block_size), GATHERED):
        for mine, reference in zip(world.replayed(attention, bucket), right, strict=True):
            torch.testing.assert_close(mine, reference)
    assert len(splits) == 2


def test_keys_are_split_only_where_the_kernel_is_right(splits: list[int]) -> None:
    """Alone, or a row of each sequence by joined heads and without a window: the rest is one split."""
    auto, one = 0, 1
    World([(30, 5)], 4, 4, 6).attended(VarlenAttention(4))
    World([(30, 1), (9, 1)], 4, 4, 6).attended(VarlenAttention(4))
    World([(30, 1), (9, 1)], 4, 1, 6).attended(VarlenAttention(4))
    World([(30, 5), (9, 5)], 4, 4, 6).attended(VarlenAttention(4))
    assert splits == [auto, auto, auto, one, one, one, one, one]


def test_softcap_is_refused_in_place(splits: list[int]) -> None:
    world = World([(9, 1)], 4, 1, None)
    batch = RaggedBatch.build(world.layout, world.cache, VarlenAttention(4))
    with pytest.raises(InternalError, match="softcap"):
        batch.attend(0, world.query, None, softcap=3.0)
    assert not splits


LAYER = LayerLayout(KV_HEADS, HEAD_DIM, HEAD_DIM, 6, 4)
REFUSED = {
    "a CPU": (LAYER, torch.bfloat16, CPU, "requires a CUDA device"),
    "32 bits": (LAYER, torch.float32, CUDA, "not float32"),
    "softcap": (LayerLayout(2, 16, 16, None, 1, 30.0), torch.bfloat16, CUDA, "softcap"),
    "two head sizes": (LayerLayout(2, 16, 8, None), torch.bfloat16, CUDA, "the same for keys and values"),
    "an odd head size": (LayerLayout(2, 20, 20, None), torch.bfloat16, CUDA, "multiple of 8"),
    "a large head": (LayerLayout(2, 512, 512, None), torch.bfloat16, CUDA, "up to 256"),
}


@pytest.mark.parametrize(("layer", "dtype", "device", "why"), REFUSED.values(), ids=REFUSED)
def test_what_the_kernel_cannot_serve_is_gathered_or_refused(
    layer: LayerLayout, dtype: torch.dtype, device: torch.device, why: str
) -> None:
    assert choose_attention("auto", [layer], dtype, device, None) is GATHERED
    assert choose_attention("gathered", [layer], dtype, device, None) is GATHERED
    with pytest.raises(InvalidArgumentError, match=f"^attention_backend: varlen .*{why}"):
        choose_attention("varlen", [layer], dtype, device, None)


def test_a_torch_without_block_tables_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.engine.backends.cache_attention import varlen

    monkeypatch.setattr(varlen, "varlen_attn", lambda query, key, value, cu_seq_q: None)
    assert "newer torch" in str(reason_against([LAYER], torch.bfloat16, CUDA))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_trial_passes_where_the_kernel_is_right(dtype: torch.dtype) -> None:
    layers = [LAYER, LayerLayout(KV_HEADS, HEAD_DIM, HEAD_DIM, None, 1)]
    with kernel_on_cpu() as splits:
        assert error_in_trial(VarlenAttention(256), layers, dtype, CPU) is None
    assert len(splits) == 2 * 5


def test_the_trial_sees_blocks_that_the_kernel_refuses() -> None:
    with kernel_on_cpu():
        why = error_in_trial(VarlenAttention(16), [LAYER], torch.bfloat16, CPU)
    assert why is not None
    assert "blocks of 16: Paged KV cache block size must be divisible by 256" in why
    assert error_in_trial(VarlenAttention(256), [LAYER], torch.bfloat16, CPU) is not None, "no kernel"


FAULTS = ["causality", "window", "blocks", "lengths", "split"]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_trial_sees_a_wrong_kernel(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.engine.backends.cache_attention import varlen

    inner = varlen.varlen_attn

    def wrong(query: Tensor, *args: Tensor, **more: object) -> Tensor:
        left, right = more["window_size"]  # type: ignore[misc]
        lengths, blocks = more["seqused_k"], more["block_table"]
        assert isinstance(lengths, Tensor)
        assert isinstance(blocks, Tensor)
        changed = {
            "causality": {"window_size": (left, -1)},
            "window": {"window_size": (-1, right)},
            "blocks": {"block_table": blocks.roll(1, 1)},
            "lengths": {"seqused_k": (lengths - 1).clamp_min(1)},
            "split": {},
        }[fault]
        if fault == "lengths":
            ends = torch.nn.functional.pad(changed["seqused_k"].cumsum(0), (1, 0)).int()  # type: ignore[union-attr]
            args = (*args[:3], ends, *args[4:])
        out = inner(query, *args, **more | changed)  # type: ignore[arg-type]
        assert isinstance(out, Tensor)
        if fault == "split" and more["num_splits"] != 1:
            out[1:] = torch.nan
        return out

    monkeypatch.setattr(varlen, "varlen_attn", wrong)
    with kernel_on_cpu():
        why = error_in_trial(VarlenAttention(256), [LAYER], torch.bfloat16, CPU)
    assert why is not None
    assert "differs from the reference" in why
