"""The fused pass gives transformers' logits, and covers only models it supports."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
)

from paceline.engine.backends import fused_eager, linear
from paceline.engine.backends.fused_eager import covers
from paceline.engine.backends.torch_backend import TorchBackend
from paceline.engine.layout import SequenceInput
from paceline.engine.loading.model import make_runner, random_model
from paceline.engine.runner import ModelRunner

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
UNCOMPILED = ["torch", "fused_eager"]
LAYER_TYPES = ["full_attention", "sliding_attention"]
COVERED: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama, grouped": lambda: LlamaConfig(**SHAPE, num_key_value_heads=2),
    "llama, tied": lambda: LlamaConfig(**SHAPE, num_key_value_heads=4, tie_word_embeddings=True),
    "llama, wide heads": lambda: LlamaConfig(**SHAPE, num_key_value_heads=1, head_dim=16),
    "llama, biases": lambda: LlamaConfig(**SHAPE, num_key_value_heads=2, attention_bias=True, mlp_bias=True),
    "llama, llama3 rope": lambda: LlamaConfig(**SHAPE, num_key_value_heads=2, rope_parameters=LLAMA3_ROPE),
    "llama, yarn rope": lambda: LlamaConfig(**SHAPE, num_key_value_heads=2, rope_parameters=YARN_ROPE),
    "mistral": lambda: MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=7),
    "qwen2": lambda: Qwen2Config(**SHAPE, num_key_value_heads=2),
    "qwen2, a window in one layer": lambda: Qwen2Config(
        **SHAPE, num_key_value_heads=2, use_sliding_window=True, sliding_window=6, layer_types=LAYER_TYPES
    ),
    "qwen3": lambda: Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=16),
}


def is_fused(runner: ModelRunner) -> bool:
    return isinstance(runner.backend, TorchBackend) and isinstance(
        runner.backend.recordable.forward, fused_eager.FusedForward
    )


def with_random_norms_and_biases(config: PreTrainedConfig) -> Any:
    """Fresh models have gains of one and biases of zero, which no pass could confuse."""
    model = random_model(config)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture(params=["packed", "plain"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With oneDNN's packed weights and, as on other devices, without."""
    if request.param == "plain":
        for module in (fused_eager, linear):
            monkeypatch.setattr(module, "can_pack", lambda _: False)
    return str(request.param)


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("name", COVERED)
def test_fused_equals_transformers_on_ragged_batches(name: str) -> None:
    """Prefill, chunks, decode and verification rows, batches in which sequences come and go."""
    config = COVERED[name]()
    plain = make_runner(with_random_norms_and_biases(config), num_blocks=64, block_size=4)
    short = make_runner(
        with_random_norms_and_biases(config), num_blocks=64, block_size=4, backends=UNCOMPILED
    )
    assert is_fused(short)
    rng = random.Random(5)
    tables = {runner: [runner.new_table() for _ in range(3)] for runner in (plain, short)}
    for _ in range(8):
        members = rng.sample(range(3), rng.randint(1, 3))
        tokens = {i: [rng.randrange(97) for _ in range(rng.choice([1, 1, 4, 9]))] for i in members}
        wanted = {i: rng.randint(0, len(tokens[i])) for i in members}
        logits = [
            runner.forward([SequenceInput(tables[runner][i], tokens[i], wanted[i]) for i in members])
            for runner in (plain, short)
        ]
        torch.testing.assert_close(logits[0], logits[1], atol=2e-5, rtol=1e-5)
        cut = rng.choice(members)
        for runner in (plain, short):
            table = tables[runner][cut]
            table.truncate_to(max(0, table.length - 2))


def test_joined_weights_are_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpacked, the modules' projections become views of the joined weights and still run."""
    monkeypatch.setattr(fused_eager, "can_pack", lambda _: False)
    model = random_model(COVERED["llama, grouped"]())
    before = model.model.layers[0].self_attn.k_proj.weight.clone()
    make_runner(model, num_blocks=8, backends=UNCOMPILED)
    attention = model.model.layers[0].self_attn
    assert torch.equal(attention.k_proj.weight, before)
    storages = {p.weight.untyped_storage().data_ptr() for p in (attention.q_proj, attention.v_proj)}
    assert storages == {attention.k_proj.weight.untyped_storage().data_ptr()}


@pytest.mark.parametrize("name", ["llama, grouped", "llama, tied"])
def test_packed_weights_replace_the_models(name: str) -> None:
    """The embedding stays, whoever else uses it."""
    model = random_model(COVERED[name]())
    make_runner(model, num_blocks=8, backends=UNCOMPILED)
    layer = model.model.layers[1]
    projections = (*layer.self_attn.children(), *layer.mlp.children())
    assert all(p.weight.numel() == 0 for p in projections if hasattr(p, "weight"))
    assert model.model.embed_tokens.weight.shape == (97, 32)
    assert (model.lm_head.weight.numel() > 0) == ("tied" in name)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SHAPE, num_key_value_heads=2, hidden_act="gelu"),
        LlamaConfig(
            **SHAPE,
            num_key_value_heads=2,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        ),
        StableLmConfig(**SHAPE, num_key_value_heads=2),
    ],
    ids=["gelu", "dynamic rope", "another family"],
)
def test_uncovered_models_are_left_to_their_modules(config: Any) -> None:
    """What it does not cover exactly it does not touch."""
    assert not covers(random_model(config))


def test_an_unknown_layer_type_is_left_to_the_modules() -> None:
    """A quantised or adapted projection."""

    class Adapted(torch.nn.Linear):
        pass

    model = random_model(COVERED["llama, grouped"]())
    model.model.layers[1].mlp.up_proj = Adapted(32, 48, bias=False)
    assert not covers(model)


@pytest.mark.planted
def test_a_wrong_fused_pass_is_rejected_at_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Planted: the rotary tables lack the sign of half their entries. The modules serve, unharmed."""
    original = fused_eager._Halves.__init__

    def without_sign(self: Any, cos: torch.Tensor, sin: torch.Tensor) -> None:
        original(self, cos, sin)
        self._sin = self._sin.abs()

    config = COVERED["llama, grouped"]()
    expected = make_runner(random_model(config), num_blocks=8)
    monkeypatch.setattr(fused_eager._Halves, "__init__", without_sign)
    runner = make_runner(random_model(config), num_blocks=8, backends=UNCOMPILED)
    assert not is_fused(runner)
    assert "is not served by the backend fused_eager" in caplog.text
    logits = [r.forward([SequenceInput(r.new_table(), [1, 2, 3], 3)]) for r in (expected, runner)]
    torch.testing.assert_close(*logits, atol=2e-5, rtol=1e-5)
