"""The memory of a cache: its default size, and checks of a requested size."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import torch
from transformers import AutoConfig

from paceline.core.errors import InvalidArgumentError
from paceline.engine.cache import LayerLayout, default_memory_bytes, num_blocks_for
from paceline.engine.device import free_bytes

log = logging.getLogger(__name__)

_GIB: Final = 1 << 30


def num_blocks_on_cpu(
    layers: Sequence[LayerLayout], block_size: int, dtype: torch.dtype, share: float | None
) -> int:
    """Number of blocks that fit into the default share of this machine's free memory.

    `share` is that of a GPU, which has no meaning here. Raises InvalidArgumentError naming `num_blocks`.
    """
    if share is not None:
        # `auto` found no GPU.
        log.warning("--gpu-memory-utilization applies to GPUs only, and this worker computes on the CPU")
    return num_blocks_for(default_memory_bytes(), layers, block_size, dtype)


def check_fits(num_blocks: int, block_size: int, block_bytes: int, device: torch.device) -> None:
    """Raises InvalidArgumentError naming `num_blocks` if the cache exceeds the free memory."""
    free = free_bytes(device)
    needed = num_blocks * block_bytes
    if free is not None and needed > free:
        raise InvalidArgumentError(
            "num_blocks",
            f"{num_blocks} blocks of {block_size} positions take {_gib(needed)}, and {device} has "
            f"{_gib(free)} free: at most {free // block_bytes} fit",
        )


def check_before_weights(
    name: str,
    device: torch.device,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype | None,
    trust_remote_code: bool,
) -> None:
    """Run `check_fits` before the weights of the model `name` are loaded, which may take minutes.

    The weights take memory later, so a cache that passes here is checked again with them. A model whose
    configuration does not give the size of an entry passes.
    """
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # loading the model reports the error
        log.debug("the cache of %s cannot be measured before its weights: %r", name, error)
        return
    width = numbers_per_position(config)
    if width is not None:
        # The smallest dtype if the checkpoint's own is used: a cache too large for it fits in none.
        block_bytes = block_size * width * (dtype or torch.bfloat16).itemsize
        check_fits(num_blocks, block_size, block_bytes, device)


def numbers_per_position(config: Any) -> int | None:
    """Keys and values of one position over all layers; None for a model with unusual ones."""
    text = config.get_text_config(decoder=True)
    unusual = any(getattr(text, name, None) for name in ("kv_lora_rank", "num_kv_shared_layers"))
    heads = getattr(text, "num_attention_heads", None)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    layers, hidden = (getattr(text, name, None) for name in ("num_hidden_layers", "hidden_size"))
    counts: list[Any] = [heads, kv_heads, layers, hidden]
    if unusual or not all(isinstance(count, int) and count > 0 for count in counts):
        return None
    heads, kv_heads, layers, hidden = counts
    width: Any = getattr(text, "head_dim", None) or hidden // heads
    return int(2 * layers * kv_heads * width) if isinstance(width, int) else None


def _gib(count: float) -> str:
    return f"{count / _GIB:,.1f} GiB"
