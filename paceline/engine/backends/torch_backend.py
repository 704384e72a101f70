"""Passes by tensor operations, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.engine.backends.cache_attention.gathered import GATHERED
from paceline.engine.backends.cache_attention.interface import CacheAttention
from paceline.engine.backends.interface import Recordable, Skills
from paceline.engine.backends.ragged_batch import RaggedBatch
from paceline.engine.cache import PagedCache
from paceline.engine.cancel import CancelToken
from paceline.engine.layout import PassLayout
from paceline.engine.multi_step import Chain, ChainInput


class BatchForward(Protocol):
    """The arithmetic of one model."""

    def __call__(self, batch: RaggedBatch) -> Tensor:
        """Logits of the rows that the batch keeps, [rows, vocabulary]; call in inference mode."""

    def pack(self) -> bool:
        """As `Backend.pack`."""


class TorchBackend:
    """Lays out a pass as a ragged batch and computes it by one `BatchForward`."""

    skills = Skills()

    def __init__(
        self, forward: BatchForward, weight_bytes: int, attention: CacheAttention = GATHERED
    ) -> None:
        self._forward = forward
        self._attention = attention
        self.weight_bytes = weight_bytes

    @property
    def recordable(self) -> Recordable:
        """The arithmetic itself."""
        return Recordable(self._forward, self._attention)

    @torch.inference_mode()
    def forward(self, layout: PassLayout, cache: PagedCache, cancel: CancelToken) -> Tensor | None:
        """float32 [rows wanted, vocabulary]; `cancel` is ignored."""
        batch = RaggedBatch.build(layout, cache, self._attention)
        return self._forward(batch)[: batch.num_logits].float()

    def draw_chains(
        self, layout: PassLayout, inputs: Sequence[ChainInput], cache: PagedCache, cancel: CancelToken
    ) -> Sequence[Chain]:
        """Empty chains: all are drawn step by step."""
        return [Chain(())] * len(inputs)

    def pack(self) -> bool:
        """Pack the arithmetic's weights."""
        return self._forward.pack()


def bytes_read(model: Any) -> int:
    """Bytes of weights that a decode step reads: all except an embedding that is not also the head."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    looked_up = None if head is not None and head.weight is embedding.weight else embedding.weight
    return sum(p.numel() * p.itemsize for p in model.parameters() if p is not looked_up)
