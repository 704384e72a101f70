"""A model's weights laid out for the compiled pass.

The time of a decode step is the time to read every weight once. If all weights are bfloat16 numbers, as in
nearly all checkpoints, they are stored as such: half the bytes and the same products, since a bfloat16 is a
float32 whose lower half is zero. Any other weight keeps all of them in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.engine.backends.compiled.tiles import BESIDE, BROAD
from paceline.engine.backends.compiled.vectors import LANES

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]

_LARGE_PAGE: Final = 1 << 19
"""Words in 2 MiB."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The weight arguments of `decoder_pass`."""

    shape: Integers
    epsilon: np.float32
    scaling: np.float32
    windows: Integers
    embedding: Floats
    weights: Words
    gains: Floats
    biases: Floats
    head_gains: Floats
    cos: Floats
    sin: Floats

    @classmethod
    def of(cls, model: Any, windows: Sequence[int | None], positions: int) -> Weights:
        """Copy the weights out of a model of the Llama family; `release` frees the model's own."""
        config, layers = model.config, model.model.layers
        attention = layers[0].self_attn
        embedding = model.model.embed_tokens.weight.data
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, attention.head_dim
        cos, sin = model.model.rotary_emb(embedding, torch.arange(positions)[None])
        linears = (*(linear for layer in layers for linear in _linears(layer)), model.lm_head)
        halves = all(_is_bfloat16(linear.weight.data) for linear in linears)
        norms = [norm for x in layers for norm in (x.input_layernorm, x.post_attention_layernorm)]
        vocabulary = _in_whole_tiles(len(model.lm_head.weight))
        shape = [len(layers), config.hidden_size, heads, kv_heads, dim, config.intermediate_size]
        biased = attention.q_proj.bias is not None
        normed = hasattr(attention, "q_norm")
        return cls(
            shape=np.array([*shape, vocabulary, biased, halves], dtype=np.int64),
            epsilon=np.float32(config.rms_norm_eps),
            scaling=np.float32(attention.scaling),
            windows=np.array([window or 0 for window in windows], dtype=np.int64),
            embedding=np.ascontiguousarray(embedding.numpy()),
            weights=_one_after_the_other([_tiles(matrix, halves) for matrix in _matrices(model)]),
            gains=torch.stack([norm.weight.data for norm in (*norms, model.model.norm)]).numpy(),
            biases=np.stack([_joined(_inputs(x.self_attn), "bias").numpy() for x in layers])
            if biased
            else np.zeros((1, 1), dtype=np.float32),
            head_gains=np.stack([_head_gains(x.self_attn, heads, kv_heads).numpy() for x in layers])
            if normed
            else np.zeros((1, 1, 1), dtype=np.float32),
            cos=np.ascontiguousarray(cos[0].numpy()),
            sin=np.ascontiguousarray(sin[0].numpy()),
        )


def release(model: Any) -> None:
    """Release the model's own copies of the weights; it can no longer run.

    The embedding stays, because it is shared.
    """
    for layer in model.model.layers:
        for linear in _linears(layer):
            linear.weight.data = linear.weight.data.new_empty(0)
    if model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr():
        model.lm_head.weight.data = model.lm_head.weight.data.new_empty(0)


def fits(model: Any) -> bool:
    """True for float32 on a CPU in widths of whole tiles."""
    attention = model.model.layers[0].self_attn
    widths = (model.config.hidden_size, model.config.intermediate_size, attention.head_dim)
    biased = any(linear.bias is not None for linear in _beyond_inputs(model))
    return (
        all(p.device.type == "cpu" and p.dtype == torch.float32 for p in model.parameters())
        and all(width % LANES == 0 for width in widths)
        and not biased
    )


def _beyond_inputs(model: Any) -> Iterator[Any]:
    """Products that may not have a bias: all except query, key and value."""
    yield model.lm_head
    for layer in model.model.layers:
        yield from (layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)


def _inputs(attention: Any) -> tuple[Any, ...]:
    return attention.q_proj, attention.k_proj, attention.v_proj


def _linears(layer: Any) -> Iterator[Any]:
    yield from _inputs(layer.self_attn)
    yield from (layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)


def _joined(modules: Sequence[Any], name: str) -> Tensor:
    return torch.cat([getattr(module, name).data for module in modules])


def _matrices(model: Any) -> Iterator[Tensor]:
    """[out, in] of every product in the order of `decoder_pass`: four a layer, and the head."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield _joined(_inputs(attention), "weight")
        yield attention.o_proj.weight.data
        yield _joined((mlp.gate_proj, mlp.up_proj), "weight")
        yield mlp.down_proj.weight.data
    yield model.lm_head.weight.data


def _head_gains(attention: Any, heads: int, kv_heads: int) -> Tensor:
    """[heads + kv_heads, head_dim]."""
    query = attention.q_norm.weight.data.expand(heads, -1)
    return torch.cat([query, attention.k_norm.weight.data.expand(kv_heads, -1)])


def _in_whole_tiles(outputs: int) -> int:
    return -(-outputs // LANES) * LANES


def _is_bfloat16(weight: Tensor) -> bool:
    return bool(((weight.view(torch.int32) & 0xFFFF) == 0).all())


def aligned(words: int) -> Words:
    """An uninitialised array of `words`, aligned to a cache line so that no vector spans two lines.

    A large array is aligned to large pages: a pass reads all of it, and needs a lookup for every page. (numpy
    requests large pages from Linux for arrays of two or more.)
    """
    begins, more = (_LARGE_PAGE, 2 * _LARGE_PAGE) if words >= _LARGE_PAGE // 2 else (LANES, LANES)
    room = np.empty(words + more, dtype=np.uint32)
    first = -room.ctypes.data % (begins * 4) // 4
    return room[first : first + words]


def _one_after_the_other(parts: Sequence[Words]) -> Words:
    return np.concatenate(parts, out=aligned(sum(len(part) for part in parts)))


def _tiles(weight: Tensor, halves: bool) -> Words:
    """[out, in] as tiles of 16 outputs, one after the other.

    With `BESIDE`, `BROAD` of them form one wide tile, and only the remainder are tiles of 16. A tile of n
    outputs is [in, n] flat; missing outputs are zero. As halves it is [in / 2, n], each word with an input's
    weight and, in its upper half, the next input's.
    """
    n_out, n_in = weight.shape
    padded = torch.zeros(_in_whole_tiles(n_out), n_in)
    padded[:n_out] = weight
    broad = BROAD * LANES if BESIDE else LANES
    end = len(padded) // broad * broad
    parts = ((padded[:end], broad), (padded[end:], LANES))
    return np.concatenate([_alike(rows, outputs, halves) for rows, outputs in parts])


def _alike(weight: Tensor, outputs: int, halves: bool) -> Words:
    """[out, in] as tiles of `outputs` outputs, of which `out` is a multiple."""
    tiles = weight.view(-1, outputs, weight.shape[1]).transpose(1, 2).contiguous()
    words: Words = tiles.view(-1).numpy().view(np.uint32)
    if not halves:
        return words
    even, odd = words.reshape(-1, 2, outputs).transpose(1, 0, 2)
    return (even >> np.uint32(16) | odd).reshape(-1)
