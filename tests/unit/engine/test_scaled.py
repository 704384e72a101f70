"""A scaled model computes the small one's logits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from paceline import assets
from paceline.core.errors import InvalidArgumentError
from paceline.engine.backends.registry import BACKENDS
from paceline.engine.layout import SequenceInput
from paceline.engine.loading.model import make_runner, random_model
from paceline.engine.loading.scaled import UNIT, checkpoint_of, scaled, shape_of

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}


def small_model(*, tied: bool) -> Any:
    model = random_model(LlamaConfig(**SHAPE, tie_word_embeddings=tied))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def compiled_logits(model: Any) -> list[torch.Tensor]:
    """Of a prompt, of one token after it, and of five in one pass, through the compiled pass."""
    runner = make_runner(model, num_blocks=8, backends=BACKENDS, deterministic=True)
    assert runner.backend.skills.row_invariant
    tokens = torch.randint(0, 97, (26,), generator=torch.Generator().manual_seed(1)).tolist()
    table = runner.new_table()
    parts = [tokens[:20], tokens[20:21], tokens[21:]]
    return [runner.forward([SequenceInput(table, part, len(part))]).clone() for part in parts]


@pytest.mark.parametrize("scale", [2, 7, 16])
def test_a_shape_has_about_the_scaled_parameters(scale: int) -> None:
    layers, neurons = shape_of(12, 2048, scale)
    assert layers % 12 == 0
    assert neurons % UNIT == 0
    assert layers * neurons == pytest.approx(12 * 2048 * scale, rel=0.02)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scale", [2, 7])
def test_scaled_modules_give_the_same_logits(scale: int, tied: bool) -> None:
    small = small_model(tied=tied)
    large = scaled(copy.deepcopy(small), scale)
    tokens = torch.randint(0, 97, (2, 20), generator=torch.Generator().manual_seed(2))
    for model in (small, large):
        model.set_attn_implementation("eager")
    torch.testing.assert_close(large(tokens).logits, small(tokens).logits)
    assert sum(p.numel() for p in large.model.layers.parameters()) > 1.4 * sum(
        p.numel() for p in small.model.layers.parameters()
    )


@pytest.mark.parametrize("scale", [2, 7])
def test_the_scaled_compiled_pass_gives_the_same_bits(scale: int) -> None:
    small = small_model(tied=True)
    large = scaled(copy.deepcopy(small), scale)
    for a, b in zip(compiled_logits(small), compiled_logits(large), strict=True):
        assert torch.equal(a, b)


def test_added_weights_are_bfloat16_numbers() -> None:
    large = scaled(small_model(tied=True), 7)
    assert all(torch.equal(p, p.bfloat16().to(p.dtype)) for p in large.parameters())
    assert all(p.isfinite().all() for p in large.parameters())


def test_a_scale_of_one_is_the_model_itself() -> None:
    small = small_model(tied=True)
    assert scaled(small, 1) is small


def test_names_of_scaled_models_are_resolved() -> None:
    assert assets.resolve("embedded:target@7") == assets.resolve("embedded:target")
    assert assets.scale_of("embedded:target@7") == 7
    assert [assets.scale_of(name) for name in ("embedded:target", "org/model@7", "/a/b")] == [1, 1, 1]


@pytest.mark.parametrize("name", ["target@0", "target@65", "target@", "target@x", "target@-1", "draft@2"])
def test_an_invalid_scale_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"embedded:{name}"):
        assets.resolve(f"embedded:{name}", "target_model")


def test_a_saved_checkpoint_is_the_scaled_model(tmp_path: Path) -> None:
    folder = checkpoint_of("embedded:target@2", tmp_path)
    small, large = (
        AutoModelForCausalLM.from_pretrained(f) for f in (assets.resolve("embedded:target"), folder)
    )
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(large(tokens).logits, small(tokens).logits)
    assert AutoTokenizer.from_pretrained(folder).vocab_size == 2048
    assert checkpoint_of("embedded:target", tmp_path) == assets.resolve("embedded:target")
