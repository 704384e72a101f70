"""The tensors of a paged KV cache, one pair a layer, and the number of blocks that fit into memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from paceline.core.errors import InvalidArgumentError
from paceline.decoding.transfer import to_device
from paceline.engine.memory import available_bytes
from paceline.kv import BlockPool, CopyBlock

DEFAULT_BLOCK_SIZE: Final = 16

_MEMORY_SHARE: Final = 0.25
"""Share of the machine's free memory that a cache takes by default: other processes need memory too."""


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Storage and visibility of one attention layer, as observed in a forward pass."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    """Sliding window: a row at position p sees positions (p - window, p]. None sees all of [0, p]."""
    per_kv: int = 1
    """Query heads of each key-value head."""
    softcap: float | None = None
    """Bound of the scores before the softmax."""

    @property
    def width(self) -> int:
        """Numbers in one entry: the keys of all heads, then their values."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)

    def split(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Views of entries [..., width]: keys [..., kv_heads, key_dim], values [..., kv_heads, value_dim]."""
        edge, shape = self.num_kv_heads * self.key_dim, entries.shape[:-1]
        keys = entries[..., :edge].view(*shape, self.num_kv_heads, self.key_dim)
        return keys, entries[..., edge:].view(*shape, self.num_kv_heads, self.value_dim)


class PagedCache:
    """Entries of every layer, [num_blocks * block_size, width], and the pool of blocks.

    An entry is the keys of all heads, then their values: one write and one gather for both. Memory is not
    cleared: attention reads only slots with an entry of a table or a branch, or slots written in this pass.
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
        alike = len({(layer.num_kv_heads, layer.key_dim, layer.value_dim) for layer in layers}) == 1
        # Layers of one shape share a tensor [layers, slots, width], so that one call makes all their views.
        self._groups = [
            torch.empty(len(group), slots, group[0].width, dtype=dtype, device=self.device)
            for group in ([self.layers] if alike else [(layer,) for layer in self.layers])
        ]
        self.entries = [entries for group in self._groups for entries in group.unbind(0)]
        """Of each layer, [slots, width]."""
        parts = [layer.split(entries) for layer, entries in zip(self.layers, self.entries, strict=True)]
        self.keys = [keys for keys, _ in parts]
        """Views of each layer, [slots, kv_heads, key_dim]."""
        self.values = [values for _, values in parts]
        """Views of each layer, [slots, kv_heads, value_dim]."""
        halves = [layer.split(group) for layer, group in zip(self.layers, self._groups, strict=False)]
        self._by_head = [tuple(part.transpose(1, 2).unsqueeze(1) for part in pair) for pair in halves]
        self.flat = self._groups[0].view(len(self.layers), -1) if alike else None
        """A view of all entries, [layers, slots * width], if all layers have one shape."""
        on_host = self.device.type == "cpu"
        self._bytes = [group.view(torch.uint8).numpy() for group in self._groups] if on_host else []
        """On a CPU, each group as bytes, [layers, slots, width in bytes]: numpy copies a few rows of any type
        in half the time of a torch call."""
        self.windows = [layer.window for layer in self.layers]
        self.bytes_per_block = bytes_per_block(self.layers, block_size, dtype)

    def slots(self, start: int, stop: int) -> list[Tensor]:
        """The entries of consecutive slots in each layer, [stop - start, width]: views."""
        return [view for group in self._groups for view in group.narrow(1, start, stop - start).unbind(0)]

    def by_head(self, start: int, stop: int) -> list[tuple[Tensor, Tensor]]:
        """Views in attention's layout: keys and values of each layer, [1, kv_heads, slots, dim]."""
        views: list[tuple[Tensor, Tensor]] = []
        for keys, values in self._by_head:
            cut = (part.narrow(3, start, stop - start).unbind(0) for part in (keys, values))
            views.extend(zip(*cut, strict=True))
        return views

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool."""
        return self.pool.num_blocks

    @property
    def block_size(self) -> int:
        """Number of entries in a block."""
        return self.pool.block_size

    @torch.inference_mode()
    def copy_block(self, source: int, destination: int) -> None:
        """Copy every layer's entries of one block onto another."""
        size = self.pool.block_size
        read = slice(source * size, (source + 1) * size)
        write = slice(destination * size, (destination + 1) * size)
        for group in self._groups:
            group[:, write] = group[:, read]

    @torch.inference_mode()
    def copy_slots(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy every layer's entries of single slots to others; sources and destinations must be disjoint."""
        if not sources:
            return
        if self._bytes:
            for raw in self._bytes:
                raw[:, destinations] = raw[:, sources]
            return
        both = [list(sources), list(destinations)]  # one copy to the device
        read, write = to_device(torch.tensor(both, dtype=torch.int64), self.device)
        for group in self._groups:
            group.index_copy_(1, write, group.index_select(1, read))

    def apply(self, copies: Sequence[CopyBlock]) -> None:
        """Carry out the copies that a block table requested, in order."""
        for copy in copies:
            self.copy_block(copy.source, copy.destination)


def bytes_per_block(layers: Sequence[LayerLayout], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers."""
    return block_size * sum(layer.width for layer in layers) * dtype.itemsize


def num_blocks_for(
    memory_bytes: int, layers: Sequence[LayerLayout], block_size: int, dtype: torch.dtype
) -> int:
    """Number of blocks that fit into `memory_bytes`; raises InvalidArgumentError if there are none."""
    block = bytes_per_block(layers, block_size, dtype)
    if memory_bytes < block:
        raise InvalidArgumentError(
            "num_blocks", f"{memory_bytes} bytes hold no block of {block} bytes ({block_size} entries)"
        )
    return memory_bytes // block


def default_memory_bytes() -> int:
    """The default bytes of a KV cache on a CPU: a share of the free memory."""
    available = available_bytes()
    if available is None:
        raise InvalidArgumentError("num_blocks", "must be given: this system does not report its free memory")
    return int(available * _MEMORY_SHARE)
