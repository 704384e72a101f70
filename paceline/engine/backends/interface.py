"""The interface of a backend, which computes a model's passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from paceline.engine.backends.cache_attention.gathered import GATHERED
from paceline.engine.backends.cache_attention.interface import CacheAttention
from paceline.engine.backends.ragged_batch import RaggedBatch
from paceline.engine.cache import LayerLayout, PagedCache
from paceline.engine.cancel import CancelToken
from paceline.engine.layout import PassLayout
from paceline.engine.multi_step import Chain, ChainInput, ChainSkills


@dataclass(frozen=True, slots=True)
class Skills:
    """Optional abilities of a backend."""

    row_invariant: bool = False
    """The logits of a row are bitwise the same whatever other rows are in its pass."""
    cancellable: bool = False
    """A pass can be cancelled before its halfway point."""
    chains: ChainSkills | None = None
    """Its abilities to draw chains; None if it draws none."""


@dataclass(frozen=True, slots=True)
class Recordable:
    """The tensor operations of a backend's passes."""

    forward: Callable[[RaggedBatch], Tensor]
    """The logits of a batch, [rows wanted or more, vocabulary]. It uses tensor operations only."""
    attention: CacheAttention
    """The attention of its batches."""


class Backend(Protocol):
    """Computes passes over a paged cache. Not thread safe: one thread owns it."""

    @property
    def skills(self) -> Skills:
        """Its current abilities."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a decode step reads."""

    @property
    def recordable(self) -> Recordable | None:
        """What a device can record; None if there is nothing."""

    def forward(self, layout: PassLayout, cache: PagedCache, cancel: CancelToken) -> Tensor | None:
        """float32 [rows wanted, at least the vocabulary]; None if a `cancellable` pass was cancelled.

        The entries of the rows are then in `cache`. Other entries do not change, except the slots of a
        cancelled pass's own rows. Later passes do not change the result.
        """

    def draw_chains(
        self, layout: PassLayout, inputs: Sequence[ChainInput], cache: PagedCache, cancel: CancelToken
    ) -> Sequence[Chain]:
        """The chain of each input; `layout` is theirs (`PassLayout.of_chains`), most steps first.

        A chain is shorter than its `steps` if the next logits are not a distribution or if it was cancelled.
        It is empty if its tokens must be drawn step by step, which is always so without `skills.chains`. The
        entries of the fed tokens are then in `cache`.
        """

    def pack(self) -> bool:
        """Take over the model's weights if that is faster; True if its modules can no longer run.

        Called once, after the logits have been found right.
        """


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model to make a backend for."""

    model: Any
    """A transformers decoder on Paceline's attention, in evaluation mode."""
    layers: Sequence[LayerLayout]
    max_positions: int
    """Number of positions that its tables must cover."""
    vocab_size: int
    """Number of tokens that chains choose from; the model's output may be wider."""
    deterministic: bool = False
    """True if row invariance is required, at any cost."""
    attention: CacheAttention = GATHERED
    """The attention of torch backends."""


BackendFactory = Callable[[ServedModel], Backend | None]
"""Makes the backend of a model, which is unchanged until `pack`; None if it does not serve the model.

The backend is compared with transformers on a few tokens before it serves."""
