"""A fused forward pass for the Llama family: the model's own arithmetic in a third of the calls.

A step of a small model is a hundred matrix products inside a thousand module calls. Here, projections with a
common input are one product, rotary tables are looked up, and results are written in place if possible. If
oneDNN is available, the weights are packed for products of few rows (linear.py) and the model's own copies
are released.

Logits differ from those of transformers' modules only in their last bits. A model is compared with
transformers' eager attention before it is served, and runs through its modules if it differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from paceline.engine.backends.interface import ServedModel
from paceline.engine.backends.linear import Linear, NormedLinear, Product, can_pack
from paceline.engine.backends.ragged_batch import RaggedBatch
from paceline.engine.backends.torch_backend import TorchBackend, bytes_read

_FAMILY: Final = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)


@dataclass(slots=True)
class _Layer:
    """The products of one layer; the first and the third include the layer's norms."""

    qkv: Product
    head_gain: Tensor | None
    """[heads + kv_heads, head_dim]: gains of the norms of query and key heads, if the model has them."""
    output: Product
    gate_up: Product
    down: Product


class FusedForward:
    """Computes a batch's logits from a model's weights, without its modules."""

    def __init__(self, model: Any, max_model_len: int) -> None:
        config = model.config
        self._epsilon = config.rms_norm_eps
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._head_dim = model.model.layers[0].self_attn.head_dim
        self._scaling = model.model.layers[0].self_attn.scaling
        self._embedding = model.model.embed_tokens.weight.data
        positions = torch.arange(max_model_len, device=self._embedding.device)[None]
        cos, sin = model.model.rotary_emb(self._embedding, positions)
        self._halves = _Halves(cos[0], sin[0])
        self._rotary: _Rotary = self._halves
        self._layers = [self._layer(layer) for layer in model.model.layers]
        tied = model.lm_head.weight.data_ptr() == self._embedding.data_ptr()
        head = Linear(self._embedding, model.lm_head.bias) if tied else Linear.joined([model.lm_head])
        self._head: Product = self._normed(model.model.norm, head)

    def _normed(self, norm: Any, linear: Linear) -> NormedLinear:
        return NormedLinear(norm.weight.data, self._epsilon, linear)

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        gain = None
        if hasattr(attention, "q_norm"):
            query = attention.q_norm.weight.data.expand(self._heads, -1)
            gain = torch.cat([query, attention.k_norm.weight.data.expand(self._kv_heads, -1)])
        return _Layer(
            self._normed(
                layer.input_layernorm, Linear.joined([attention.q_proj, attention.k_proj, attention.v_proj])
            ),
            gain,
            Linear.joined([attention.o_proj]),
            self._normed(layer.post_attention_layernorm, Linear.joined([mlp.gate_proj, mlp.up_proj])),
            Linear.joined([mlp.down_proj]),
        )

    def __call__(self, batch: RaggedBatch) -> Tensor:
        """Logits of the rows that the batch keeps, [rows, vocabulary]; call in inference mode."""
        hidden = F.embedding(batch.input_ids[0], self._embedding)
        rows, dim, rotated = hidden.shape[0], self._head_dim, self._heads + self._kv_heads
        width = (rotated + self._kv_heads) * dim
        angles = self._rotary.at(batch.position_ids[0])
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(hidden)
            turned = qkv.as_strided((rows, rotated, dim), (width, dim, 1))
            if layer.head_gain is not None:
                torch.mul(F.rms_norm(turned, (dim,), None, self._epsilon), layer.head_gain, out=turned)
            self._rotary.turn(turned, angles)
            batch.write(index, qkv.narrow(1, self._heads * dim, 2 * self._kv_heads * dim))
            query = qkv.as_strided((rows, self._heads, dim), (width, dim, 1))
            attended = batch.attend(index, query, self._scaling)
            hidden.add_(layer.output(attended.reshape(rows, -1)))
            gate, up = layer.gate_up(hidden).chunk(2, -1)
            hidden.add_(layer.down(F.silu(gate).mul_(up)))
        keep = batch.logits_to_keep
        return self._head(hidden[-keep:] if isinstance(keep, int) else hidden.index_select(0, keep))

    def pack(self) -> bool:
        """Pack the weights for products of few rows, if possible.

        The model's modules lose those weights and cannot run any more. Only a head that is also the embedding
        is then held twice.
        """
        if not can_pack(self._embedding):
            return False
        # The dimensions of query and key heads may have any common order.
        in_head = self._halves.paired_order()
        rotated = self._heads + self._kv_heads
        heads = torch.arange(rotated + self._kv_heads)[:, None] * self._head_dim
        order = heads + torch.arange(self._head_dim)
        order[:rotated] = heads[:rotated] + in_head
        for layer in self._layers:
            layer.qkv, layer.output = layer.qkv.packed(order.ravel()), layer.output.packed()
            layer.gate_up, layer.down = layer.gate_up.packed(), layer.down.packed()
            if layer.head_gain is not None:
                layer.head_gain = layer.head_gain[:, in_head]
        self._head = self._head.packed()
        self._rotary = self._halves.paired()
        return True


class _Rotary(Protocol):
    """Rotary embeddings looked up by position and applied to query and key heads in place."""

    def at(self, positions: Tensor) -> Any:
        """Angles of the rows at these positions, [rows], for `turn`."""

    def turn(self, heads: Tensor, angles: Any) -> None:
        """Rotate [rows, heads, head_dim]."""


class _Halves:
    """transformers' order of a head's dimensions: i turns with i + head_dim / 2."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        """Tables [positions, head_dim]."""
        self._half = cos.shape[1] // 2
        self._cos = cos[:, None]
        # rotate_half(x) is (-x2, x1): with the sign in the table, one roll does it.
        self._sin = torch.cat([-sin[:, : self._half], sin[:, self._half :]], dim=1)[:, None]

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def turn(self, heads: Tensor, angles: tuple[Tensor, Tensor]) -> None:
        other = heads.roll(self._half, -1)
        heads.mul_(angles[0]).addcmul_(other, angles[1])

    def paired(self) -> _Pairs:
        """For heads in `paired_order`."""
        return _Pairs(self._cos[..., : self._half], self._sin[..., self._half :])

    def paired_order(self) -> Tensor:
        """int64 [head_dim]: the order that puts dimensions that rotate together side by side."""
        return torch.arange(2 * self._half).view(2, self._half).T.ravel()


class _Pairs:
    """Dimension 2i rotates with 2i + 1: a product of complex numbers. float32 only."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        """Tables [positions, 1, head_dim / 2]."""
        self._table = torch.complex(cos, sin)

    def at(self, positions: Tensor) -> Tensor:
        return self._table.index_select(0, positions)

    def turn(self, heads: Tensor, angles: Tensor) -> None:
        heads.view(torch.complex64).mul_(angles)


def fused_eager_backend(served: ServedModel) -> TorchBackend | None:
    """The fused backend, for models that it supports, on any device."""
    if not covers(served.model):
        return None
    weight_bytes = bytes_read(served.model)
    return TorchBackend(FusedForward(served.model, served.max_positions), weight_bytes, served.attention)


def covers(model: Any) -> bool:
    """True for a model that the fused pass computes exactly: a known family without unusual parts."""
    if type(model) not in _FAMILY:
        return False
    config = model.config
    rope_type = str(getattr(model.model.rotary_emb, "rope_type", "default"))
    return (
        config.hidden_act in ("silu", "swish")
        # Quantised or adapted layers have other types.
        and all(type(p) is nn.Linear for p in _projections(model))
        # A rotary table that changes with the length cannot be looked up.
        and "dynamic" not in rope_type
        and "longrope" not in rope_type
    )


def _projections(model: Any) -> Iterator[Any]:
    yield model.lm_head
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield from (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        yield from (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
