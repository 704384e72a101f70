"""What computes the passes of one model: a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from paceline.engine.backends.ragged_batch import RaggedBatch
from paceline.engine.cache import LayerLayout, PagedCache
from paceline.engine.cancel import CancelToken
from paceline.engine.layout import PassLayout
from paceline.engine.multi_step import Chain, ChainInput, ChainSkills


@dataclass(frozen=True, slots=True)
class Skills:
    """What a backend can do besides computing logits."""

    row_invariant: bool = False
    """The logits of a row are bitwise the same whatever other rows are in its pass."""
    cancellable: bool = False
    """A pass that is cancelled before it is half done is given up."""
    chains: ChainSkills | None = None
    """How it draws chains by itself; None where it does not."""


class Backend(Protocol):
    """Computes passes over a paged cache. Not thread safe: one thread owns it."""

    @property
    def skills(self) -> Skills:
        """What it can do now."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a decode step reads."""

    @property
    def recordable(self) -> Callable[[RaggedBatch], Tensor] | None:
        """The logits of a batch, [rows wanted or more, vocabulary], by operations on tensors alone, which a
        device can record; None where there is nothing to record."""

    def forward(self, layout: PassLayout, cache: PagedCache, cancel: CancelToken) -> Tensor | None:
        """float32 [rows wanted, at least the vocabulary]; None where a `cancellable` pass was cancelled.

        The entries of the rows are in `cache` afterwards. Nothing else there changes, but for the slots of a
        cancelled pass's own rows. The result stays as it is when other passes run.
        """

    def draw_chains(
        self, layout: PassLayout, inputs: Sequence[ChainInput], cache: PagedCache, cancel: CancelToken
    ) -> Sequence[Chain]:
        """The chain of each input; `layout` is theirs (`PassLayout.of_chains`), those with most steps first.

        A chain is shorter than its `steps` where the logits after it are no distribution or where it was
        cancelled, and empty where its tokens must be drawn step by step, always so without `skills.chains`.
        The entries of what was fed to get the tokens are in `cache` afterwards.
        """

    def pack(self) -> bool:
        """Take the model's weights over where that helps; True if so: its modules cannot run after that.

        Called once, when the logits have been found right.
        """


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that a backend is made for."""

    model: Any
    """A transformers decoder on Paceline's attention, in evaluation mode."""
    layers: Sequence[LayerLayout]
    max_positions: int
    """Positions that its tables must reach to."""
    vocab_size: int
    """Tokens that chains choose from: the model's output may be wider."""
    deterministic: bool = False
    """Row invariance is asked for, whatever it costs."""


BackendFactory = Callable[[ServedModel], Backend | None]
"""Makes the backend of a model, which is left as it is until `pack`; None where it does not serve the model.

What it gives is compared with transformers on a few tokens before it serves."""
