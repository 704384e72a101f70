"""Copies a Llama model into a larger shape that computes the same function."""

from __future__ import annotations

from transformers import LlamaForCausalLM


def put_into(large: LlamaForCausalLM, small: LlamaForCausalLM) -> None:
    """Copy `small` into `large`, which has at least as many layers and neurons per layer.

    Output weights of the added parts are set to zero; their input weights are unchanged. The caller must
    disable gradients.
    """
    large.model.embed_tokens.load_state_dict(small.model.embed_tokens.state_dict())
    large.model.norm.load_state_dict(small.model.norm.state_dict())
    large.lm_head.load_state_dict(small.lm_head.state_dict())
    for new, old in zip(large.model.layers, small.model.layers, strict=False):
        neurons = old.mlp.gate_proj.weight.size(0)
        for name in ("self_attn", "input_layernorm", "post_attention_layernorm"):
            getattr(new, name).load_state_dict(getattr(old, name).state_dict())
        new.mlp.gate_proj.weight[:neurons] = old.mlp.gate_proj.weight
        new.mlp.up_proj.weight[:neurons] = old.mlp.up_proj.weight
        new.mlp.down_proj.weight[:, :neurons] = old.mlp.down_proj.weight
        new.mlp.down_proj.weight[:, neurons:] = 0.0
    for new in large.model.layers[len(small.model.layers) :]:
        new.self_attn.o_proj.weight.zero_()
        new.mlp.down_proj.weight.zero_()
