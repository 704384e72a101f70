"""A Llama checkpoint grown to a larger shape with the same function: a heavy target for benchmarks.

The added neurons and layers write zeros into the residual stream, so every token and every logit stays the
same, while each pass reads and multiplies as much as a model of the larger shape.
"""

from __future__ import annotations

import copy
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from paceline import assets
from paceline.assets.enlarging import put_into

SEED = 7
"""Seed of the added weights, whose values change no output."""
STD = 0.02
"""Standard deviation of the added weights, as at the start of training."""
UNIT = 64
"""The neurons of a layer are a multiple of this, as packed products prefer."""


def shape_of(layers: int, neurons: int, scale: int) -> tuple[int, int]:
    """Layers and neurons of about `scale` times the parameters.

    The depth grows by the square root of half the scale, the width by the rest.
    """
    deeper = max(1, round(math.sqrt(scale / 2)))
    return layers * deeper, round(neurons * scale / deeper / UNIT) * UNIT


@torch.no_grad()
def scaled(small: Any, scale: int) -> Any:
    """`small`, a LlamaForCausalLM, grown to about `scale` times its parameters.

    The added weights are bfloat16 numbers, so that 16-bit storage of the weights stays exact.
    """
    if scale == 1:
        return small
    config = copy.deepcopy(small.config)
    config.num_hidden_layers, config.intermediate_size = shape_of(
        config.num_hidden_layers, config.intermediate_size, scale
    )
    with torch.device("meta"):
        large = type(small)(config)
    large = large.to_empty(device=small.device).to(small.dtype)
    generator = torch.Generator(small.device).manual_seed(SEED)
    for parameter in large.parameters():
        # Norms have one dimension.
        if parameter.dim() > 1:
            parameter.normal_(0.0, STD, generator=generator)
        else:
            parameter.fill_(1.0)
        parameter.copy_(parameter.bfloat16())
    large.model.rotary_emb = small.model.rotary_emb
    large.tie_weights()
    put_into(large, small)
    large.generation_config = small.generation_config
    return large.eval()


def checkpoint_of(model: str, folder: Path) -> str:
    """The path of the checkpoint for `model`; that of `embedded:target@N` is saved in `folder`."""
    small, scale = assets.resolve(model), assets.scale_of(model)
    if scale == 1:
        return small
    large = scaled(AutoModelForCausalLM.from_pretrained(small, dtype=torch.bfloat16), scale)
    large.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(small) / name, folder)
    return str(folder)
