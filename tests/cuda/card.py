"""Memory of the pretended devices: what tensors take, by shapes, and what torch's allocator would keep.

A freed tensor's memory stays reserved until it is used again or the cache is emptied; there are no gaps. All
graphs of a pool share the most that one of them needs. What a graph takes besides its tensors is not shown.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from tests.cuda.captures import Pool

UNIT: Final = 512
"""Bytes that every allocation is rounded up to."""
DEFAULT_TOTAL: Final = 1 << 34
_ORDINARY: Final = (-1, -1)
"""The pool of all that is not recorded."""


@dataclass
class _Part:
    """A device's memory of one pool."""

    live: int = 0
    reserved: int = 0


@dataclass
class _Storage:
    part: _Part
    size: int
    tensors: int = 0


class CardMemory:
    """Both devices have the same size."""

    def __init__(self) -> None:
        self.total = DEFAULT_TOTAL
        self.others = 0
        """Bytes of other processes, on each device."""
        self.full: Callable[[], bool] = lambda: False
        """Asked at each allocation: whether it fails, whatever is free."""
        self._parts: dict[tuple[int, Pool], _Part] = collections.defaultdict(_Part)
        self._storages: dict[tuple[int, int], _Storage] = {}
        self._num_graphs: collections.Counter[Pool] = collections.Counter()
        self._peaks: dict[int, int] = collections.defaultdict(int)

    def hold(self, tensor: Tensor, inside: Tensor, index: int, pool: Pool | None) -> None:
        """Count the storage of `inside` on device `index` as long as a tensor like this one is there.

        `pool` is that of the open capture. Raises torch.OutOfMemoryError.
        """
        storage = inside.untyped_storage()
        key = index, storage.data_ptr()
        if not storage.nbytes():
            return
        held = self._storages.get(key)
        if held is None:
            size = -(-storage.nbytes() // UNIT) * UNIT
            part = self._parts[index, pool or _ORDINARY]
            self._allocate(index, part, size)
            held = self._storages[key] = _Storage(part, size)
        held.tensors += 1
        weakref.finalize(tensor, self._release, key, held)

    def keep_graph(self, graph: Any, pool: Pool) -> None:
        """The pool keeps its memory until the last of its graphs is gone."""
        self._num_graphs[pool] += 1
        weakref.finalize(graph, self._drop_graph, pool)

    def reserved(self, index: int) -> int:
        """Bytes that torch has of the device."""
        return sum(part.reserved for (device, _), part in self._parts.items() if device == index)

    def recorded(self, index: int) -> int:
        """Bytes of all pools of recordings."""
        return self.reserved(index) - self._parts[index, _ORDINARY].reserved

    def peak(self, index: int) -> int:
        """The most that was reserved since the peak was reset."""
        return max(self._peaks[index], self.reserved(index))

    def reset_peak(self, index: int) -> None:
        """The peak begins with what is reserved now."""
        self._peaks[index] = self.reserved(index)

    def instead_of_cuda(self, numbered: Callable[[Any], int]) -> dict[str, Any]:
        """What is used of `torch.cuda`; `numbered` gives the index of a device."""

        def allocated(device: Any = None) -> int:
            return sum(part.live for (index, _), part in self._parts.items() if index == numbered(device))

        def info(device: Any = None) -> tuple[int, int]:
            return self.total - self.others - self.reserved(numbered(device)), self.total

        return {
            "mem_get_info": info,
            "memory_allocated": allocated,
            "memory_reserved": lambda device=None: self.reserved(numbered(device)),
            "max_memory_reserved": lambda device=None: self.peak(numbered(device)),
            "reset_peak_memory_stats": lambda device=None: self.reset_peak(numbered(device)),
            "empty_cache": self._empty,
        }

    def _allocate(self, index: int, part: _Part, size: int) -> None:
        free = self.total - self.others - self.reserved(index)
        more = part.live + size - part.reserved
        if more > free:
            self._empty()
            free = self.total - self.others - self.reserved(index)
            more = part.live + size - part.reserved
        if more > free or self.full():
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size}, {free} are free.")
        part.live += size
        part.reserved = max(part.reserved, part.live)
        self._peaks[index] = self.peak(index)

    def _empty(self) -> None:
        for (_, pool), part in self._parts.items():
            if not self._num_graphs[pool]:
                part.reserved = part.live

    def _release(self, key: tuple[int, int], held: _Storage) -> None:
        held.tensors -= 1
        if not held.tensors:
            held.part.live -= held.size
            if self._storages.get(key) is held:
                del self._storages[key]

    def _drop_graph(self, pool: Pool) -> None:
        self._num_graphs[pool] -= 1
