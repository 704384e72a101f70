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
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from paceline.core.errors import InternalError, InvalidArgumentError
from paceline.engine.backends.ragged_batch import RaggedBatch
from paceline.engine.cache import LayerLayout

IMPLEMENTATION: Final = "paceline"
BATCH_KEYWORD: Final = "paceline_batch"

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
    return batch.attend(layer, query[0].transpose(0, 1), scaling, softcap).unsqueeze(0), None


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
    per_kv = query.shape[1] // key.shape[1]
    probe.layers[layer] = LayerLayout(key.shape[1], key.shape[3], value.shape[3], window, per_kv, softcap)
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
