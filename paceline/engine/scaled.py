"""A Llama checkpoint grown to a larger shape that computes the same function: a heavy target for benchmarks.

What the added neurons and layers write into the residual stream is zero, so every token and every logit stays
the same, while each pass reads and multiplies as much as a model of the larger shape.
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

SEED = 7
"""Of the added weights, whose values change no output."""
STD = 0.02
"""Their standard deviation, as at the start of training."""
UNIT = 64
"""Neurons of a layer are a multiple of this, which packed products like."""


def shape_of(layers: int, neurons: int, scale: int) -> tuple[int, int]:
    """Layers and neurons of about `scale` times the parameters.

    Deeper by the root of half the scale, and wider by the rest.
    """
    deeper = max(1, round(math.sqrt(scale / 2)))
    return layers * deeper, round(neurons * scale / deeper / UNIT) * UNIT


@torch.no_grad()
def scaled(small: Any, scale: int) -> Any:
    """`small`, a LlamaForCausalLM, grown to about `scale` times its parameters.

    The added weights are bfloat16 numbers, so that what stores such weights in 16 bits still may.
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
        parameter.normal_(0.0, STD, generator=generator)
        parameter.copy_(parameter.bfloat16())
    large.model.embed_tokens.load_state_dict(small.model.embed_tokens.state_dict())
    large.model.norm.load_state_dict(small.model.norm.state_dict())
    large.model.rotary_emb = small.model.rotary_emb
    large.lm_head.load_state_dict(small.lm_head.state_dict())
    large.tie_weights()
    old_layers = small.model.layers
    for index, new in enumerate(large.model.layers):
        if index >= len(old_layers):
            new.input_layernorm.weight.fill_(1.0)
            new.post_attention_layernorm.weight.fill_(1.0)
            new.self_attn.o_proj.weight.zero_()
            new.mlp.down_proj.weight.zero_()
            continue
        old = old_layers[index]
        neurons = old.mlp.gate_proj.weight.size(0)
        for name in ("self_attn", "input_layernorm", "post_attention_layernorm"):
            getattr(new, name).load_state_dict(getattr(old, name).state_dict())
        new.mlp.gate_proj.weight[:neurons] = old.mlp.gate_proj.weight
        new.mlp.up_proj.weight[:neurons] = old.mlp.up_proj.weight
        new.mlp.down_proj.weight[:, :neurons] = old.mlp.down_proj.weight
        new.mlp.down_proj.weight[:, neurons:] = 0.0
    large.generation_config = small.generation_config
    return large.eval()


def checkpoint_of(model: str, folder: Path) -> str:
    """The checkpoint that others load for `model`; that of `embedded:target@N` is saved in `folder`."""
    small, scale = assets.resolve(model), assets.scale_of(model)
    if scale == 1:
        return small
    large = scaled(AutoModelForCausalLM.from_pretrained(small, dtype=torch.bfloat16), scale)
    large.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(small) / name, folder)
    return str(folder)
