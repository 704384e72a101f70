"""The interface of attention over a paged cache, and its part in laying out a pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.decoding.transfer import to_device
from paceline.engine.cache import PagedCache
from paceline.engine.layout import Indices, PassLayout


class PassAttention(Protocol):
    """What the rows of one pass see, on the device. Every layer uses it."""

    def attend(
        self, cache: PagedCache, layer: int, query: Tensor, scaling: float | None, softcap: float | None
    ) -> Tensor:
        """Attention of rows [T, Hq, D] over their sequences' entries in `layer`; returns [T, Hq, Dv].

        The rows of the pass see one another through the cache, so their entries must have been written.
        `scaling` None is 1 / sqrt(D).
        """


class FixedAttention(Protocol):
    """The attention of all passes of one recorded shape."""

    def at(self, blocks: Tensor, positions: Tensor) -> PassAttention:
        """The attention of one pass. Nothing in it may depend on the numbers on the host.

        Args:
            blocks: int64 [S, width]: the blocks of each sequence, from position 0 on.
            positions: int64 [S, rows]: consecutive positions of each sequence's rows, at its end; padding
                before them repeats the first one.
        """


class CacheAttention(Protocol):
    """One implementation of attention, for all passes of a model."""

    @property
    def name(self) -> str:
        """Its name in `--attention-backend`."""

    @property
    def smallest_block(self) -> int:
        """The block size of its caches is a multiple of this."""

    @property
    def in_place(self) -> bool:
        """True if entries are read where they lie: a recorded pass then reads those of its sequences only."""

    def lay_out(
        self, layout: PassLayout, cache: PagedCache, parts: Packer
    ) -> Callable[[Sequence[Tensor]], PassAttention]:
        """Add the index arrays of a pass to `parts`; the result makes its attention of `parts.send()`."""

    def fixed(
        self, sequences: int, rows: int, keys: int, block_size: int, device: torch.device
    ) -> FixedAttention:
        """The attention of recorded passes of `sequences` with `rows` rows each and up to `keys` entries.

        Entries lie in blocks of `block_size`, or anywhere if it is 1.
        """


class Packer:
    """Many small index arrays, sent to the device in one transfer."""

    def __init__(self) -> None:
        self._arrays: list[Indices] = []

    def add(self, array: npt.NDArray[Any]) -> int:
        """The place of an int64 array [n] among the sent tensors."""
        self._arrays.append(array)
        return len(self._arrays) - 1

    def send(self, device: torch.device) -> list[Tensor]:
        """int64 tensors, in the order in which their arrays were added."""
        whole = array_to_device(np.concatenate(self._arrays).astype(np.int64, copy=False), device)
        return list(torch.split(whole, [array.size for array in self._arrays]))


def array_to_device(array: Indices, device: torch.device) -> Tensor:
    """The array as a tensor; on a CPU without a copy."""
    return to_device(torch.from_numpy(array), device)
