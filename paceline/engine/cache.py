"""The tensors of a paged KV cache, one pair a layer, and how many blocks fit into memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from paceline.core.errors import InvalidArgumentError
from paceline.engine.attention import LayerLayout
from paceline.kv import BlockPool, CopyBlock

DEFAULT_BLOCK_SIZE: Final = 16

_MEMORY_SHARE: Final = {"cpu": 0.25, "cuda": 0.85}
"""Part of the free memory a cache takes by default. On the CPU others live there too."""


class PagedCache:
    """Keys and values of every layer, [num_blocks * block_size, kv_heads, dim], and the pool of blocks.

    Memory is not cleared: only slots that a table has committed (or writes in this pass) are ever read.
    """

    def __init__(
        self,
        layers: Sequence[LayerLayout],
        *,
        num_blocks: int,
        block_size: int = DEFAULT_BLOCK_SIZE,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.layers = tuple(layers)
        self.dtype = dtype
        self.device = torch.device(device)
        slots = num_blocks * block_size
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for layer in self.layers:
            shape = (slots, layer.num_kv_heads)
            self.keys.append(torch.empty(*shape, layer.key_dim, dtype=dtype, device=self.device))
            self.values.append(torch.empty(*shape, layer.value_dim, dtype=dtype, device=self.device))
        # The same memory as attention wants to see it, [1, kv_heads, slots, dim].
        self.keys_by_head = [tensor.transpose(0, 1).unsqueeze(0) for tensor in self.keys]
        self.values_by_head = [tensor.transpose(0, 1).unsqueeze(0) for tensor in self.values]
        self.windows = [layer.window for layer in self.layers]
        self.bytes_per_block = bytes_per_block(self.layers, block_size, dtype)

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self.pool.num_blocks

    @property
    def block_size(self) -> int:
        """Entries in a block."""
        return self.pool.block_size

    @torch.inference_mode()
    def copy_block(self, source: int, destination: int) -> None:
        """Copy every layer's entries of one block onto another."""
        size = self.pool.block_size
        read = slice(source * size, (source + 1) * size)
        write = slice(destination * size, (destination + 1) * size)
        for tensor in (*self.keys, *self.values):
            tensor[write] = tensor[read]

    def apply(self, copies: Sequence[CopyBlock]) -> None:
        """Carry out the copies a block table asked for, in order."""
        for copy in copies:
            self.copy_block(copy.source, copy.destination)


def bytes_per_block(layers: Sequence[LayerLayout], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers."""
    entry = sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in layers)
    return block_size * entry * dtype.itemsize


def num_blocks_for(
    memory_bytes: int, layers: Sequence[LayerLayout], block_size: int, dtype: torch.dtype
) -> int:
    """How many blocks fit into `memory_bytes`; raises InvalidArgumentError when not even one does."""
    block = bytes_per_block(layers, block_size, dtype)
    if memory_bytes < block:
        raise InvalidArgumentError(
            "kv_cache_memory", f"{memory_bytes} bytes hold no block of {block} bytes ({block_size} entries)"
        )
    return memory_bytes // block


def default_memory_bytes(device: torch.device | str) -> int:
    """The part of `device`'s free memory that a KV cache takes when nobody says how much."""
    device = torch.device(device)
    share = _MEMORY_SHARE.get(device.type, 0.5)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * share)
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(int(line.split()[1]) * 1024 * share)
    raise InvalidArgumentError("kv_cache_memory", "must be given: this system does not tell how much is free")
