"""The compiled pass of one model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.engine.attention import LayerLayout
from paceline.engine.cache import PagedCache
from paceline.engine.compiled.kernels import decoder_pass, scratch_of
from paceline.engine.compiled.layout import Layout
from paceline.engine.compiled.weights import Weights, fits, release


class CompiledForward:
    """Computes logits by `decoder_pass`. Not thread safe: it owns its scratch."""

    def __init__(self, model: Any, windows: Sequence[int | None], max_model_len: int) -> None:
        self._weights = Weights.of(model, windows, max_model_len)
        self._model = model
        self._per_row, self._per_key, self._besides = scratch_of(self._weights.shape.tolist())
        self._work = np.empty(0, dtype=np.float32)
        self._cache: PagedCache | None = None
        self._entries = np.empty((0, 0), dtype=np.float32)

    def __call__(self, layout: Layout, cache: PagedCache) -> Tensor:
        """float32 [rows wanted, vocabulary, padded]; the rows' keys and values are in `cache` afterwards."""
        w = self._weights
        if cache is not self._cache:
            assert cache.flat is not None
            self._cache, self._entries = cache, cache.flat.numpy()
        size = len(layout.ids) * self._per_row + layout.key_count.max() * self._per_key + self._besides
        if size > len(self._work):
            self._work = np.empty(size, dtype=np.float32)
        logits = np.zeros((len(layout.wanted), w.shape[6]), dtype=np.float32)
        decoder_pass(
            w.shape,
            w.epsilon,
            w.scaling,
            w.windows,
            w.embedding,
            w.weights,
            w.biases,
            w.head_gains,
            w.cos,
            w.sin,
            self._entries,
            layout.ids,
            layout.positions,
            layout.slots,
            layout.keys,
            layout.key_first,
            layout.key_count,
            layout.wanted,
            self._work,
            logits,
        )
        return torch.from_numpy(logits)

    def pack(self) -> None:
        """Give up the model's own copies of the weights: it runs through this pass only from here on."""
        release(self._model)


def compiled_forward(
    model: Any, layers: Sequence[LayerLayout], max_model_len: int, *, any_threads: bool = False
) -> CompiledForward | None:
    """The compiled pass for a model that lean.py covers; None where it does not serve.

    It uses one thread: with more of them oneDNN's products are faster, and it serves only if `any_threads`.
    """
    alike = len({(layer.num_kv_heads, layer.key_dim, layer.value_dim) for layer in layers}) == 1
    if (torch.get_num_threads() > 1 and not any_threads) or not alike or not fits(model):
        return None
    return CompiledForward(model, [layer.window for layer in layers], max_model_len)
