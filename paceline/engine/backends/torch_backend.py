"""Passes by operations on tensors, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.engine.backends.interface import Skills
from paceline.engine.backends.ragged_batch import RaggedBatch
from paceline.engine.cache import PagedCache
from paceline.engine.cancel import CancelToken
from paceline.engine.layout import PassLayout
from paceline.engine.multi_step import Chain, ChainInput


class BatchForward(Protocol):
    """The arithmetic of one model."""

    def __call__(self, batch: RaggedBatch) -> Tensor:
        """The logits the batch keeps, [rows, vocabulary]; called in inference mode."""

    def pack(self) -> bool:
        """As for a backend."""


class TorchBackend:
    """Lays a pass out as a ragged batch and computes it by one `BatchForward`."""

    skills = Skills()

    def __init__(self, forward: BatchForward, weight_bytes: int) -> None:
        self._forward = forward
        self.weight_bytes = weight_bytes

    @property
    def recordable(self) -> Callable[[RaggedBatch], Tensor] | None:
        """The arithmetic."""
        return self._forward

    @torch.inference_mode()
    def forward(self, layout: PassLayout, cache: PagedCache, cancel: CancelToken) -> Tensor | None:
        """float32 [rows wanted, vocabulary]; `cancel` is not looked at."""
        batch = RaggedBatch.build(layout, cache)
        return self._forward(batch)[: batch.num_logits].float()

    def draw_chains(
        self, layout: PassLayout, inputs: Sequence[ChainInput], cache: PagedCache, cancel: CancelToken
    ) -> Sequence[Chain]:
        """None of them: all are drawn step by step."""
        return [Chain(())] * len(inputs)

    def pack(self) -> bool:
        """As the arithmetic does."""
        return self._forward.pack()


def bytes_read(model: Any) -> int:
    """Bytes of weights that a decode step reads: of all but an embedding that is not the head as well."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    looked_up = None if head is not None and head.weight is embedding.weight else embedding.weight
    return sum(p.numel() * p.itemsize for p in model.parameters() if p is not looked_up)
