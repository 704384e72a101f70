"""The short forward pass gives the logits of transformers' modules, and knows when it cannot."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

from paceline.engine.batch import SequenceInput
from paceline.engine.lean import LeanLlama, lean_forward
from paceline.engine.loading import make_runner, random_model

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


@pytest.mark.parametrize(
    "more",
    [
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 4, "tie_word_embeddings": True},
        {"num_key_value_heads": 1, "head_dim": 16},
        {"num_key_value_heads": 2, "rope_parameters": LLAMA3_ROPE},
    ],
    ids=["grouped", "tied", "wide heads", "llama3 rope"],
)
def test_equals_transformers_modules_on_ragged_batches(more: dict[str, Any]) -> None:
    """Prefill, chunks, decode and verification rows, batches in which sequences come and go."""
    config = LlamaConfig(**SHAPE, **more)
    plain = make_runner(random_model(config), num_blocks=64, block_size=4)
    short = make_runner(random_model(config), num_blocks=64, block_size=4, lean=True)
    assert short._lean is not None
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


def test_holds_no_weight_twice() -> None:
    """The modules' projections become views of the joined weights."""
    model = random_model(LlamaConfig(**SHAPE, num_key_value_heads=2))
    before = model.model.layers[0].self_attn.k_proj.weight.clone()
    lean = LeanLlama(model, 128)
    key = model.model.layers[0].self_attn.k_proj.weight
    assert torch.equal(key, before)
    assert key.untyped_storage().data_ptr() == lean._layers[0].qkv.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SHAPE, num_key_value_heads=2, attention_bias=True),
        LlamaConfig(**SHAPE, num_key_value_heads=2, hidden_act="gelu"),
        LlamaConfig(
            **SHAPE,
            num_key_value_heads=2,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        ),
        Qwen2Config(**SHAPE, num_key_value_heads=2),
    ],
    ids=["bias", "gelu", "dynamic rope", "another family"],
)
def test_leaves_other_models_to_their_modules(config: Any) -> None:
    """What it does not cover exactly it does not touch."""
    assert lean_forward(random_model(config), 128) is None


def test_a_wrong_short_pass_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the rotary tables lack the sign of half their entries."""
    original = LeanLlama.__init__

    def without_sign(self: LeanLlama, model: Any, max_model_len: int) -> None:
        original(self, model, max_model_len)
        self._sin = self._sin.abs()

    monkeypatch.setattr(LeanLlama, "__init__", without_sign)
    with pytest.raises(ValueError, match="model"):
        make_runner(random_model(LlamaConfig(**SHAPE, num_key_value_heads=2)), num_blocks=8, lean=True)
