"""A short forward pass for the Llama family, for models whose steps are mostly host time.

A small draft's step is a dozen matrix products inside a hundred module calls. This does the same
arithmetic with the same weights and a third of the calls: projections that share an input are one
product, the rotary tables are looked up. Last bits may differ from transformers' modules, which a draft
may afford: it can change the speed of a round, never its outcome. The target keeps transformers' modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from paceline.engine.attention import paged_attention
from paceline.engine.batch import RaggedBatch

LeanForward = Callable[[RaggedBatch], Tensor]
"""A batch to its logits [rows wanted, vocabulary]."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights of one layer; `layer_idx` is what the paged attention asks of a module."""

    layer_idx: int
    input_norm: Tensor
    qkv: Tensor
    output: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


class LeanLlama:
    """Weights of a LlamaForCausalLM, laid out for few calls."""

    def __init__(self, model: Any, max_model_len: int) -> None:
        config = model.config
        self._epsilon = config.rms_norm_eps
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._scaling = self._head_dim**-0.5
        self._embedding = model.model.embed_tokens.weight
        self._norm = model.model.norm.weight
        self._head = model.lm_head.weight
        positions = torch.arange(max_model_len, device=self._embedding.device)[None]
        cos, sin = model.model.rotary_emb(self._embedding, positions)
        self._cos, self._sin = cos[0], sin[0]
        # rotate_half(x) = (-x2, x1): with the sign in the table, one roll does it.
        half = self._head_dim // 2
        self._sin = torch.cat([-self._sin[:, :half], self._sin[:, half:]], dim=1)
        self._layers = [_layer(i, layer) for i, layer in enumerate(model.model.layers)]

    @torch.inference_mode()
    def __call__(self, batch: RaggedBatch) -> Tensor:
        """Logits of the rows the batch wants."""
        hidden = F.embedding(batch.input_ids[0], self._embedding)
        rows = len(hidden)
        cos = self._cos.index_select(0, batch.position_ids[0])[:, None]
        sin = self._sin.index_select(0, batch.position_ids[0])[:, None]
        shape = (hidden.shape[1],)
        rotated = self._heads + self._kv_heads
        for layer in self._layers:
            normed = F.rms_norm(hidden, shape, layer.input_norm, self._epsilon)
            qkv = F.linear(normed, layer.qkv).view(rows, rotated + self._kv_heads, self._head_dim)
            qk, value = qkv[:, :rotated], qkv[:, rotated:]
            qk = qk * cos + qk.roll(self._head_dim // 2, dims=-1) * sin
            attended, _ = paged_attention(
                layer,  # type: ignore[arg-type]
                qk[:, : self._heads].transpose(0, 1)[None],
                qk[:, self._heads :].transpose(0, 1)[None],
                value.transpose(0, 1)[None],
                None,
                scaling=self._scaling,
                paceline_batch=batch,
            )
            hidden = hidden + F.linear(attended.reshape(rows, -1), layer.output)
            normed = F.rms_norm(hidden, shape, layer.post_norm, self._epsilon)
            gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
        keep = batch.logits_to_keep
        hidden = hidden[-keep:] if isinstance(keep, int) else hidden.index_select(0, keep)
        return F.linear(F.rms_norm(hidden, shape, self._norm, self._epsilon), self._head)


def _layer(index: int, layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        index,
        layer.input_layernorm.weight,
        _joined(attention.q_proj, attention.k_proj, attention.v_proj),
        attention.o_proj.weight,
        layer.post_attention_layernorm.weight,
        _joined(mlp.gate_proj, mlp.up_proj),
        mlp.down_proj.weight,
    )


def _joined(*projections: Any) -> Tensor:
    """One weight for projections of the same input; theirs become views of it, so nothing is held twice."""
    weight = torch.cat([p.weight.data for p in projections])
    parts = torch.split(weight, [len(p.weight) for p in projections])
    for projection, part in zip(projections, parts, strict=True):
        projection.weight.data = part
    return weight


def lean_forward(model: Any, max_model_len: int) -> LeanForward | None:
    """The short pass for `model`, or None where the model is anything this does not cover exactly."""
    if type(model) is not LlamaForCausalLM:
        return None
    config = model.config
    covered = (
        config.hidden_act in ("silu", "swish")
        and not config.attention_bias
        and not config.mlp_bias
        and model.lm_head.bias is None
        and all(type(p).__name__ == "Linear" for p in _projections(model))
        # A rotary table that changes with the length cannot be looked up.
        and "dynamic" not in str(getattr(model.model.rotary_emb, "rope_type", "default"))
        and "longrope" not in str(getattr(model.model.rotary_emb, "rope_type", "default"))
    )
    return LeanLlama(model, max_model_len) if covered else None


def _projections(model: Any) -> list[Any]:
    """Quantised or adapted layers are of other types."""
    return [
        p
        for layer in model.model.layers
        for p in (*layer.self_attn.children(), *layer.mlp.children())
        if hasattr(p, "weight")
    ]
