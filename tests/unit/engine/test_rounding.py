"""Weights rounded to 8 bits: exactly so, once and for all, and only where somebody may round them."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from paceline.core.config import DraftConfig
from paceline.core.errors import InvalidArgumentError
from paceline.engine import loading
from paceline.engine.loading import make_runner, random_model
from paceline.engine.rounding import MOST, bytes_of, is_rounded, round_products

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = LlamaConfig(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    tie_word_embeddings=True,
)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight.clone()
    round_products(linear)
    return linear.weight.data


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 3e4])
def test_every_weight_is_a_whole_number_times_its_outputs_scale(scale: float) -> None:
    """Off by half a scale at most, or by what a bfloat16 scale falls short of the largest weight."""
    weight = torch.randn(40, 300, generator=torch.Generator().manual_seed(2)) * scale
    weight[7] = 0
    found = rounded(weight)
    numbers, scales = bytes_of(found)
    assert torch.equal(numbers * scales[:, None], found)
    assert is_rounded(found)
    assert not is_rounded(weight)
    assert numbers.abs().amax(dim=1).tolist() == [MOST] * 7 + [0] + [MOST] * 32
    assert torch.equal(scales, scales.bfloat16().float())
    largest = weight.abs().amax(dim=1, keepdim=True)
    assert ((found - weight).abs() <= largest * (0.5 / MOST + 2**-8)).all()
    assert torch.equal(rounded(found), found), "once is enough"


@pytest.mark.parametrize("largest", [1e-40, 3e-38, 1e-37, 1.2e-37, 5e-37, 1e-35])
def test_outputs_that_are_nearly_nothing_are_rounded_as_well(largest: float) -> None:
    """Once: bfloat16 had too few digits for their scales, and with one of them no weight was in 8 bits."""
    weight = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
    weight[1] *= largest / weight[1].abs().max()
    found = rounded(weight)
    assert is_rounded(found)
    assert (found[1] - weight[1]).abs().max() <= 2e-36


def test_an_embedding_that_is_the_head_as_well_stays() -> None:
    model = random_model(CONFIG)
    before = model.model.embed_tokens.weight.data.clone()
    round_products(model)
    assert torch.equal(model.model.embed_tokens.weight, before)
    assert is_rounded(model.lm_head.weight.data)
    assert is_rounded(model.model.layers[1].mlp.down_proj.weight.data)


@pytest.mark.parametrize(("quantization", "in_bytes"), [("auto", True), ("int8", True), ("none", False)])
def test_it_is_done_where_it_is_asked_for(quantization: str, in_bytes: bool) -> None:
    runner = make_runner(random_model(CONFIG), num_blocks=8, lean=True, quantization=quantization)
    assert runner.weights_in_bytes is in_bytes


def test_where_it_gains_nothing_it_is_refused_or_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through modules a step reads every weight in whole."""
    torch.set_num_threads(2)
    model = random_model(CONFIG)
    with pytest.raises(InvalidArgumentError, match="one thread of a CPU") as refusal:
        make_runner(model, num_blocks=8, lean=True, quantization="int8")
    assert refusal.value.field == "quantization"
    asked: list[object] = []
    monkeypatch.setattr(loading, "round_products", asked.append)
    make_runner(model, num_blocks=8, lean=True, quantization="auto")
    assert not asked


def test_what_is_no_quantization_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match="auto, int8, none") as refusal:
        DraftConfig(model="m", quantization="int4")
    assert refusal.value.field == "quantization"
