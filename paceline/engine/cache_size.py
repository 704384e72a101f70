"""The memory of a cache: its default size, and checks of a requested size."""

from __future__ import annotations

import logging
from typing import Any, Final

import torch
from transformers import AutoConfig

from paceline.core.errors import InvalidArgumentError
from paceline.engine.cache import default_memory_bytes
from paceline.engine.device import free_bytes

log = logging.getLogger(__name__)

_GIB: Final = 1 << 30


def memory_for_cache(device: torch.device, share: float | None) -> int:
    """Bytes for a cache whose number of blocks is not given.

    `share` is the part of a GPU's total memory for this process: its weights, which are loaded, and its
    cache. Without `share`, the cache takes a fixed part of the free memory.

    Raises InvalidArgumentError naming `gpu_memory_utilization` if the share leaves no room or exceeds the
    free memory.
    """
    if share is None:
        return default_memory_bytes(device)
    if device.type != "cuda":
        # `auto` found no GPU, and a share of a GPU does not apply to this machine's memory.
        log.warning("--gpu-memory-utilization applies to GPUs only, and this worker computes on %s", device)
        return default_memory_bytes(device)
    free, total = torch.cuda.mem_get_info(device)
    allowed, held = int(total * share), torch.cuda.memory_reserved(device)
    asked = f"{share:g} of the {_gib(total)} of {device} are {_gib(allowed)}"
    if allowed <= held:
        raise InvalidArgumentError(
            "gpu_memory_utilization", f"{asked}, and the weights alone take {_gib(held)}: ask for more"
        )
    if allowed - held > free:
        raise InvalidArgumentError(
            "gpu_memory_utilization",
            f"{asked}; the weights take {_gib(held)} of it, and only {_gib(free)} are free for the rest: "
            f"ask for at most {(held + free) / total:.2f}, or stop other processes on this device",
        )
    return allowed - held


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
