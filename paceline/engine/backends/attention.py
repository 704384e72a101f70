"""The attention that transformers calls: write new keys and values into the paged cache, then attend.

`AttentionInterface` passes every layer's query, key and value to `paged_attention`; the batch is the keyword
argument `paceline_batch` of `model(...)`. The batch alone decides what a layer attends to, never
transformers' mask. `inspect_attention` runs the model once at start. From the masks that the model requests,
it learns which layers have a sliding window, and it refuses a model with unsupported masks or arguments.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from paceline.core.errors import InternalError, InvalidArgumentError
from paceline.engine.backends.attention_group import AttentionGroup
from paceline.engine.backends.ragged_batch import RaggedBatch
from paceline.engine.cache import LayerLayout, PagedCache

IMPLEMENTATION: Final = "paceline"
BATCH_KEYWORD: Final = "paceline_batch"

_FOLD_ROWS: Final = 64
"""Query rows per key-value head up to which folding the group of query heads into rows is faster."""
_COPIED_BYTES: Final = 128 << 20
"""Room for copies of keys and values shared by several query heads during a prompt's chunk: the cache leaves
little memory, and a long prompt has many keys. With less room, each call has fewer heads to occupy a
device."""

_HARMLESS: Final = frozenset(
    {"position_ids", "position_embeddings", "past_key_values", "cache_position", "output_attentions"}
    | {"output_hidden_states", "return_dict", "use_cache", "layer_idx", "layer_type"}
)
"""Arguments of models that have no effect on attention."""


@dataclass(slots=True)
class _Probe:
    """Stands in for the batch while `inspect_attention` runs, and records the layers."""

    model_name: str
    layers: dict[int, LayerLayout] = field(default_factory=dict)

    def refuse(self, why: str) -> InvalidArgumentError:
        return InvalidArgumentError("model", f"{self.model_name} {why}")


class _Active(threading.local):
    """The batch or probe of this thread."""

    batch: RaggedBatch | None = None
    probe: _Probe | None = None


_active = _Active()


@contextmanager
def running(batch: RaggedBatch) -> Iterator[None]:
    """Make `batch` available to layers of models that do not pass keyword arguments on."""
    _active.batch = batch
    try:
        yield
    finally:
        _active.batch = None


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    paceline_batch: RaggedBatch | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of packed rows through the block tables.

    query [1, Hq, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv]; returns [1, T, Hq, Dv].
    """
    batch = paceline_batch or _active.batch
    if batch is None:
        if _active.probe is None:
            raise InternalError(f"the model was called without {BATCH_KEYWORD}")
        return _observe(_active.probe, module, query, key, value, attention_mask, softcap=softcap, **kwargs)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    batch.write_heads(layer, key, value)
    return attend(batch, layer, query[0].transpose(0, 1), scaling, softcap).unsqueeze(0), None


def attend(
    batch: RaggedBatch, layer: int, query: Tensor, scaling: float | None, softcap: float | None = None
) -> Tensor:
    """Attention of packed rows [T, Hq, D] over their sequences' entries; returns [T, Hq, Dv].

    The rows of this pass see one another through the cache, so they must have been written to it.
    """
    parts = [_attend(group, batch.cache, layer, query, scaling, softcap) for group in batch.groups]
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)
    return rows if batch.unpack is None else rows.index_select(0, batch.unpack)


def _attend(
    group: AttentionGroup,
    cache: PagedCache,
    layer: int,
    query: Tensor,
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    """Rows of one group, [S * n, Hq, Dv] in the group's row order."""
    keys, values = group.entries(cache, layer)
    sequences, rows = group.num_sequences, group.num_rows
    heads, kv_heads = query.shape[1], keys.shape[1]
    per_kv = heads // kv_heads
    # Query heads of one key-value head become rows, so keys and values are read once for all of them. For a
    # prefill chunk, however, a mask of [rows, keys] for every query head would be large.
    fold = sequences > 1 or rows * per_kv <= _FOLD_ROWS
    first, mask = group.plan(cache.windows[layer], per_kv if fold else 1, query.dtype)
    if first:
        keys, values = keys[:, :, first:], values[:, :, first:]
    if group.span is not None:
        query = query.narrow(0, *group.span)
    elif group.rows is not None:
        query = query.index_select(0, group.rows)
    if rows == 1:
        out = _sdpa(query.view(sequences, kv_heads, per_kv, -1), keys, values, mask, scaling, softcap)
        return out.reshape(sequences, heads, -1)
    q = query.view(sequences, rows, kv_heads, per_kv, -1).permute(0, 2, 3, 1, 4)
    if fold:
        q = q.reshape(sequences, kv_heads, per_kv * rows, -1)
        out = _sdpa(q, keys, values, mask, scaling, softcap).view(sequences, kv_heads, per_kv, rows, -1)
        return out.permute(0, 3, 1, 2, 4).reshape(sequences * rows, heads, -1)
    q, at_once = q[0], per_kv
    if keys.device.type != "cpu":
        copied = (keys.shape[3] + values.shape[3]) * keys.shape[2] * kv_heads * keys.element_size()
        at_once = min(per_kv, max(1, _COPIED_BYTES // copied))
    parts = [
        _attend_heads(part, keys[0], values[0], mask, scaling, softcap) for part in torch.split(q, at_once, 1)
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).flatten(0, 1).transpose(0, 1)


def _attend_heads(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None, softcap: float | None
) -> Tensor:
    """Query heads [kv_heads, n, rows, D], n of each key-value head, over keys and values [kv_heads, K, D]."""
    # Key-value heads as the batch, their query heads as heads: keys are expanded, not copied.
    keys, values = (part.unsqueeze(1).expand(-1, q.shape[1], -1, -1) for part in (keys, values))
    if q.shape[1] > 1 and keys.device.type != "cpu":
        # CUDA's memory-efficient kernel, the only one that takes a mask, can silently give wrong results on
        # such layouts (pytorch#191937). A prompt's chunk justifies a copy.
        keys, values = keys.contiguous(), values.contiguous()
    return _sdpa(q, keys, values, mask, scaling, softcap)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None, softcap: float | None
) -> Tensor:
    """Softmax attention over [..., rows, D] and [..., keys, D]; `mask` is added to the scores."""
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    scores = torch.matmul(q, k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype), v)


def _window_tag(
    *,
    q_length: int,
    mask_function: Callable[[int, int, Tensor, Tensor], Tensor],
    local_size: int | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor | None:
    """The mask for transformers: None, or during the probe a [1, 1, 1, 1] tensor with its window.

    0 stands for a plain causal mask. The mask function is evaluated around its own edges, so that chunked,
    bidirectional and image masks are recognised and refused.
    """
    probe = _active.probe
    if probe is None:
        return None
    reach = 2 * (local_size or 0) + q_length
    edges = (
        {0, q_length - 1} if local_size is None else {0, local_size - 1, local_size, local_size + 1, reach}
    )
    rows = torch.tensor(sorted(edges))[:, None]
    columns = torch.arange(reach + 2)[None, :]
    expected = columns <= rows
    if local_size is not None:
        expected &= columns > rows - local_size
    try:
        actual = torch.as_tensor(mask_function(0, 0, rows, columns)).expand_as(expected)
    except (IndexError, RuntimeError, TypeError) as error:
        raise probe.refuse("uses an attention mask that is neither causal nor a sliding window") from error
    if not torch.equal(actual.to("cpu", torch.bool), expected):
        raise probe.refuse("uses an attention mask that is neither causal nor a sliding window")
    return torch.full((1, 1, 1, 1), local_size or 0, dtype=torch.int64, device=device)


def _observe(
    probe: _Probe,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    softcap: float | None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Record one layer and refuse unsupported features; the output only has the right shape."""
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or layer in probe.layers:
        raise probe.refuse("has attention layers that do not number themselves one by one")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise probe.refuse("attends to later positions; only decoders can be served")
    if dropout:
        raise probe.refuse("applies attention dropout; it must be in evaluation mode")
    unknown = sorted(k for k, v in kwargs.items() if k not in _HARMLESS and v is not None and v is not False)
    if unknown:
        raise probe.refuse(f"passes {', '.join(unknown)} to its attention, which is not supported")
    window = sliding_window
    if attention_mask is not None:
        if attention_mask.dtype != torch.int64 or attention_mask.numel() != 1:
            raise probe.refuse("builds its own attention masks, which is not supported")
        # The reference attention follows the mask; `sliding_window` only informs fused kernels.
        window = int(attention_mask.item()) or None
    if query.shape[1] % key.shape[1] or (softcap is not None and softcap <= 0):
        raise probe.refuse("has an attention layout that is not supported")
    probe.layers[layer] = LayerLayout(key.shape[1], key.shape[3], value.shape[3], window)
    return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


@torch.inference_mode()
def inspect_attention(model: Any) -> tuple[LayerLayout, ...]:
    """Run two tokens through `model` and return the layout of every layer, in order.

    Raises InvalidArgumentError naming `model` if the model cannot be served exactly: layers with another
    state than keys and values, unknown masks or attention arguments.
    """
    name = type(model).__name__
    probe = _Probe(name)
    device = next(model.parameters()).device
    _active.probe = probe
    try:
        model(
            input_ids=torch.zeros(1, 2, dtype=torch.int64, device=device),
            position_ids=torch.arange(2, device=device)[None],
            use_cache=False,
        )
    finally:
        _active.probe = None
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if sorted(probe.layers) != list(range(num_layers)):
        raise probe.refuse(
            f"runs {len(probe.layers)} of its {num_layers} layers through transformers' attention interface; "
            "every layer must"
        )
    return tuple(probe.layers[index] for index in range(num_layers))


AttentionInterface.register(IMPLEMENTATION, paged_attention)
# Without this entry transformers assumes that no mask is needed, and a model's window would go unnoticed.
AttentionMaskInterface.register(IMPLEMENTATION, _window_tag)
