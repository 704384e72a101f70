"""The self-check at start: faults it finds, and rounding it accepts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, MixtralConfig, Qwen3MoeConfig, ZayaConfig
from transformers.models.zaya.modeling_zaya import ZayaForCausalLM

from paceline import assets
from paceline.core.errors import InvalidArgumentError
from paceline.engine.backends.attention import inspect_attention
from paceline.engine.backends.cache_attention.group import AttentionGroup
from paceline.engine.backends.cache_attention.interface import CacheAttention
from paceline.engine.backends.ragged_batch import RaggedBatch
from paceline.engine.cache import PagedCache
from paceline.engine.layout import PassLayout, SequenceInput
from paceline.engine.loading import model as loading
from paceline.engine.loading import self_check
from paceline.engine.loading.model import load_model, make_runner, random_model
from paceline.engine.runner import ModelRunner
from tests.unit.engine.test_runner import COMMON, CONFIGS

DEVICES = ["cpu", "cuda"]
"""Whose tokens are compared: on a CPU, both times."""


def compared_as_on(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(self_check._COMPARED, "cpu", self_check._COMPARED[device])


def small_model(dtype: torch.dtype = torch.float32, positions: int = 128) -> Any:
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.3,
    )
    return random_model(config, dtype=dtype)


@pytest.mark.parametrize(
    ("device", "positions", "fed"),
    [("cpu", 128, [5, 3]), ("cuda", 128, [65, 12, 3]), ("cuda", 20, [5, 12, 3]), ("cuda", 2, [2])],
)
def test_the_served_shapes_are_compared_at_start(
    device: str, positions: int, fed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk alone and two sequences in a pass; long ones have an attention call of their own."""
    monkeypatch.setitem(self_check._COMPARED, "cpu", self_check._COMPARED[device])
    seen: list[tuple[int, int]] = []
    entries = AttentionGroup.entries

    def noting(group: AttentionGroup, cache: PagedCache, layer: int) -> Any:
        if layer == 0:
            seen.append((group.num_sequences, group.num_rows))
        return entries(group, cache, layer)

    monkeypatch.setattr(AttentionGroup, "entries", noting)
    make_runner(small_model(positions=positions), num_blocks=8)
    last = fed[-1]
    beside = [(1, last)] * 2 if sum(fed) == 80 else [(2, last)]
    assert seen == [*((1, rows) for rows in fed), (1, last), *beside]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bug", ["causality", "nan"])
def test_the_self_check_sees_a_wrongly_attended_chunk(
    dtype: torch.dtype, bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU; here the same tokens are compared on a CPU."""
    plan = AttentionGroup.plan

    def wrong(group: AttentionGroup, window: int | None, repeat: int, dtype: torch.dtype) -> Any:
        if repeat > 1 or group.num_rows == 1:
            return plan(group, window, repeat, dtype)
        nan = torch.full((1, 1, group.num_rows, group.num_keys), torch.nan, dtype=dtype)
        return 0, None if bug == "causality" else nan

    monkeypatch.setattr(AttentionGroup, "plan", wrong)
    make_runner(small_model(dtype), num_blocks=8)
    monkeypatch.setitem(self_check._COMPARED, "cpu", self_check._COMPARED["cuda"])
    with pytest.raises(InvalidArgumentError, match="gives other logits"):
        make_runner(small_model(dtype), num_blocks=8)


@pytest.fixture(scope="module")
def target() -> Any:
    return load_model(assets.resolve("embedded:target"), dtype="bfloat16").model


def one_too_high(layout: PassLayout, positions: Tensor) -> Tensor:
    behind = [bool(rows.start) for rows in layout.sequences for _ in range(rows.count)]
    return positions + torch.tensor(behind)


def from_zero(layout: PassLayout, positions: Tensor) -> Tensor:
    return positions - torch.tensor([rows.start for rows in layout.sequences for _ in range(rows.count)])


def from_zero_beside_others(layout: PassLayout, positions: Tensor) -> Tensor:
    return positions if len(layout.sequences) == 1 else from_zero(layout, positions)


def all_zero(_layout: PassLayout, positions: Tensor) -> Tensor:
    return positions * 0


def planted(fault: Callable[[PassLayout, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    build = RaggedBatch.build

    def wrong(layout: PassLayout, cache: PagedCache, attention: CacheAttention) -> RaggedBatch:
        batch = build(layout, cache, attention)
        batch.position_ids = fault(layout, batch.position_ids)
        return batch

    monkeypatch.setattr(RaggedBatch, "build", wrong)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fault", [one_too_high, from_zero, from_zero_beside_others, all_zero])
def test_the_self_check_sees_wrong_positions_in_16_bits(
    fault: Callable[[PassLayout, Tensor], Tensor],
    device: str,
    target: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They must not pass as rounding."""
    compared_as_on(device, monkeypatch)
    make_runner(target, num_blocks=8)
    planted(fault, monkeypatch)
    with pytest.raises(InvalidArgumentError, match="gives other logits"):
        make_runner(target, num_blocks=8)


def test_an_error_from_the_first_row_on_is_not_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(assets.resolve("embedded:draft"), dtype="bfloat16").model
    planted(all_zero, monkeypatch)
    with pytest.raises(InvalidArgumentError, match="gives other logits"):
        make_runner(model, num_blocks=8)


@pytest.mark.parametrize("device", DEVICES)
def test_the_self_check_sees_a_wrong_window_in_16_bits(
    device: str, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared_as_on(device, monkeypatch)
    narrow = tuple(dataclasses.replace(layer, window=4) for layer in inspect_attention(target))
    monkeypatch.setattr(loading, "inspect_attention", lambda _: narrow)
    with pytest.raises(InvalidArgumentError, match="gives other logits"):
        make_runner(target, num_blocks=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_self_check_sees_a_swapped_row(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's pass wants one row; with all rows the order would hide it."""
    build = RaggedBatch.build

    def wrong(layout: PassLayout, cache: PagedCache, attention: CacheAttention) -> RaggedBatch:
        batch = build(layout, cache, attention)
        if len(layout.sequences) == 1 and len(layout.wanted) < layout.sequences[0].count:
            batch.logits_to_keep = torch.tensor([0])
        return batch

    monkeypatch.setattr(RaggedBatch, "build", wrong)
    with pytest.raises(InvalidArgumentError, match="gives other logits"):
        make_runner(small_model(dtype), num_blocks=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_self_check_sees_a_single_row_of_nan(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = ModelRunner.forward

    def wrong(runner: ModelRunner, inputs: Sequence[SequenceInput]) -> Tensor:
        logits = forward(runner, inputs)
        if len(inputs) > 1:
            logits[-1] = torch.nan
        return logits

    monkeypatch.setattr(ModelRunner, "forward", wrong)
    with pytest.raises(InvalidArgumentError, match="gives other logits"):
        make_runner(small_model(dtype), num_blocks=8)


def test_the_self_check_sees_rows_attending_to_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model does not declare it. In chunks of one sequence it is nearly right."""
    shape = {key: COMMON[key] for key in COMMON if key != "intermediate_size"} | {"num_hidden_layers": 4}
    config = ZayaConfig(
        **shape,
        num_key_value_heads=2,
        head_dim=8,
        moe_intermediate_size=16,
        num_experts=4,
        router_hidden_size=16,
        layer_types=["hybrid"] * 4,
    )
    monkeypatch.setattr(ZayaForCausalLM, "_is_stateful", False)
    compared_as_on("cuda", monkeypatch)
    model = random_model(config, seed=2, dtype=torch.bfloat16)
    with pytest.raises(InvalidArgumentError, match="gives other logits"):
        make_runner(model, num_blocks=8)


ROUNDED: dict[str, Callable[[], Any]] = {
    **CONFIGS,
    # Rounding sends rows to other experts.
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **COMMON, num_key_value_heads=2, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=24
    ),
    # Rounding adds up.
    "many layers": lambda: LlamaConfig(
        **(COMMON | {"num_hidden_layers": 128, "initializer_range": 0.15}),
        num_key_value_heads=2,
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ROUNDED)
def test_rounding_to_16_bits_is_not_an_error(
    name: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared_as_on(device, monkeypatch)
    for seed in [1] if name == "many layers" else range(4):
        make_runner(random_model(ROUNDED[name](), seed=seed, dtype=dtype), num_blocks=8)


def model_with_experts(dtype: torch.dtype = torch.bfloat16, *, seed: int = 0, **changed: Any) -> Any:
    shape = COMMON | {"num_hidden_layers": 4} | changed
    config = MixtralConfig(**shape, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2)
    return random_model(config, seed=seed, dtype=dtype)


def sensitive_model(dtype: torch.dtype = torch.bfloat16) -> Any:
    """Whose logits depend on the rows before, and which rounding does not make another model."""
    return model_with_experts(dtype, num_hidden_layers=2, initializer_range=0.2)


@pytest.mark.parametrize(("hidden", "inner", "vocab", "seed"), [(64, 128, 512, 1), (128, 256, 1000, 12)])
def test_another_expert_in_the_first_chunk_is_not_an_error(
    hidden: int, inner: int, vocab: int, seed: int
) -> None:
    """Its cache entries move all later rows."""
    shape = {"hidden_size": hidden, "intermediate_size": inner, "vocab_size": vocab, "num_hidden_layers": 8}
    heads = {"num_attention_heads": hidden // 16, "initializer_range": 0.06}
    make_runner(model_with_experts(seed=seed, **shape, **heads), num_blocks=8)


def fed_to(monkeypatch: pytest.MonkeyPatch, change: Callable[[PagedCache, Tensor, int], None]) -> list[int]:
    """The first tokens of what is fed to empty caches. `change` gets the cache, the logits and that token,
    after each pass of one sequence."""
    forward, begun = ModelRunner.forward, list[int]()

    def changing(runner: ModelRunner, inputs: Sequence[SequenceInput]) -> Tensor:
        if len(inputs) == 1 and not inputs[0].table.length:
            begun.append(inputs[0].token_ids[0])
        logits = forward(runner, inputs)
        if len(inputs) == 1:
            change(runner.cache, logits, begun[-1])
        return logits

    monkeypatch.setattr(ModelRunner, "forward", changing)
    return begun


def changed_keys(of_tokens: range) -> Callable[[PagedCache, Tensor, int], None]:
    """As another expert changes them."""

    def change(cache: PagedCache, logits: Tensor, first: int) -> None:
        if first in of_tokens:
            for entries in cache.entries:
                entries[0] = -entries[0]

    return change


@pytest.mark.parametrize(("wrong", "fed"), [(range(0), [1]), (range(18), [1, 10, 19])])
def test_further_tokens_are_tried_after_a_failure(
    wrong: range, fed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = fed_to(monkeypatch, changed_keys(wrong))
    make_runner(sensitive_model(), num_blocks=8)
    assert begun == fed


@pytest.mark.parametrize(
    ("model", "sets"),
    [
        (sensitive_model, 3),
        (lambda: sensitive_model(torch.float32), 1),
        (lambda: small_model(torch.bfloat16), 1),
    ],
    ids=["16 bits", "32 bits", "no experts"],
)
def test_only_routing_by_rounding_gets_another_try(
    model: Callable[[], Any], sets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = fed_to(monkeypatch, changed_keys(range(1000)))
    with pytest.raises(InvalidArgumentError, match="gives other logits"):
        make_runner(model(), num_blocks=8)
    assert len(begun) == sets


def test_nan_gets_no_other_try(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(cache: PagedCache, logits: Tensor, first: int) -> None:
        if first == 1:
            logits[-1] = torch.nan

    begun = fed_to(monkeypatch, spoil)
    with pytest.raises(InvalidArgumentError, match="gives other logits"):
        make_runner(sensitive_model(), num_blocks=8)
    assert begun == [1]


def test_the_token_sets_differ() -> None:
    large, small = model_with_experts(), model_with_experts(vocab_size=9)
    sets = [self_check.tokens_to_compare(large, each) for each in range(3)]
    assert len({token for tokens in sets for token in tokens}) == 24
    assert len({tuple(self_check.tokens_to_compare(small, each)) for each in range(3)}) == 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fault", [one_too_high, from_zero, from_zero_beside_others, all_zero])
def test_each_token_set_shows_wrong_positions(
    fault: Callable[[PassLayout, Tensor], Tensor], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared_as_on(device, monkeypatch)
    model = sensitive_model()
    make_runner(model, num_blocks=8)
    planted(fault, monkeypatch)
    with pytest.raises(InvalidArgumentError, match="gives other logits"):
        make_runner(model, num_blocks=8)


@pytest.mark.parametrize(
    ("layers", "spread", "seed", "fault"), [(8, 0.1, 8, one_too_high), (4, 0.12, 1, all_zero)]
)
def test_chance_matches_in_a_further_set_excuse_nothing(
    layers: int, spread: float, seed: int, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_with_experts(seed=seed, num_hidden_layers=layers, initializer_range=spread)
    make_runner(model, num_blocks=8)
    planted(fault, monkeypatch)
    with pytest.raises(InvalidArgumentError, match="gives other logits"):
        make_runner(model, num_blocks=8)


def test_a_common_offset_of_a_row_hides_no_error() -> None:
    """Softmax does not see it."""
    right = torch.randn(3, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours, shared = right.roll(1, 1), torch.tensor([[1e3], [-2e4], [0.0]], dtype=torch.float64)
    for dim in (None, 1):
        plain = self_check._error(ours, right, dim)
        torch.testing.assert_close(self_check._error(ours + shared, right + 3 * shared, dim), plain)
        assert (plain > 1).all()
