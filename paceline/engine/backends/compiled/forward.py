"""The compiled pass of one model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from paceline.decoding.sampling import wire_form
from paceline.engine.backends.compiled import compile_lock
from paceline.engine.backends.compiled.chain import decoder_chain
from paceline.engine.backends.compiled.kernels import decoder_pass, scratch_of
from paceline.engine.backends.compiled.layout import Layout
from paceline.engine.backends.compiled.weights import Weights, aligned, fits, release
from paceline.engine.cache import LayerLayout, PagedCache
from paceline.engine.cancel import CancelToken
from paceline.engine.multi_step import Chain, ChainInput

_NEVER: Final = CancelToken()


class CompiledForward:
    """Computes logits by `decoder_pass`. Not thread safe: it owns its scratch."""

    def __init__(self, model: Any, windows: Sequence[int | None], max_model_len: int) -> None:
        self._weights = w = Weights.of(model, windows, max_model_len)
        norms = w.shape, w.epsilon, w.scaling, w.windows
        self._model_of_pass = *norms, w.embedding, w.weights, w.gains, w.biases, w.head_gains, w.cos, w.sin
        self._model = model
        self._per_row, self._per_key, self._besides = scratch_of(self._weights.shape.tolist())
        self._work = np.empty(0, dtype=np.float32)
        self._cache: PagedCache | None = None
        self._entries = np.empty((0, 0), dtype=np.float32)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a decode step reads."""
        return self._weights.weights.nbytes

    def __call__(self, layout: Layout, cache: PagedCache) -> Tensor:
        """float32 [rows wanted, vocabulary, padded]; the rows' keys and values are in `cache` afterwards."""
        logits = self.unless(_NEVER, layout, cache)
        assert logits is not None
        return logits

    def unless(self, cancel: CancelToken, layout: Layout, cache: PagedCache) -> Tensor | None:
        """The same, but None where the pass was stopped before it was half done."""
        self._make_room(layout, cache)
        logits = np.zeros((len(layout.wanted), self._weights.shape[6]), dtype=np.float32)
        done = compile_lock.call(
            decoder_pass,
            *self._model_of_pass,
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
            cancel.flag,
        )
        return torch.from_numpy(logits) if done else None

    def chain(
        self,
        inputs: Sequence[ChainInput],
        layout: Layout,
        cache: PagedCache,
        vocab_size: int,
        cancel: CancelToken,
    ) -> list[Chain]:
        """Every input's chain, those with most steps first; all that was fed is in `cache` afterwards."""
        count, longest = len(inputs), inputs[0].steps
        self._make_room(layout, cache, longest)
        uniforms = np.zeros((count, longest) if any(item.draws is not None for item in inputs) else (1, 1))
        masses, bounds = np.zeros(count), np.zeros(count, dtype=np.int64)
        for i, item in enumerate(inputs):
            if item.draws is not None:
                uniforms[i, : item.steps] = item.draws.uniforms
                masses[i], bounds[i] = item.draws.mass, min(item.draws.bound, vocab_size)
        tokens = np.full((count, longest), -1, dtype=np.int64)
        ranks = min(max(item.num_others for item in inputs), vocab_size - 1)
        others = np.empty((count, longest, ranks), dtype=np.int64)
        margins = np.zeros((count, longest))
        size = count, longest, int(bounds.max())
        ids, probabilities = np.empty(size, dtype=np.uint32), np.empty(size, dtype=np.float32)
        lengths = np.zeros((count, longest), dtype=np.int64)
        compile_lock.call(
            decoder_chain,
            *self._model_of_pass,
            self._entries,
            layout.ids,
            layout.positions,
            layout.slots,
            layout.keys,
            layout.key_first,
            layout.key_count,
            layout.wanted,
            np.array([item.steps for item in inputs], dtype=np.int64),
            np.array([item.temperature or 1.0 for item in inputs], dtype=np.float64),
            np.array([item.noise is not None for item in inputs], dtype=np.bool_),
            np.array([item.noise.seed if item.noise else 0 for item in inputs], dtype=np.uint64),
            np.array([item.noise.first if item.noise else 0 for item in inputs], dtype=np.uint64),
            uniforms,
            masses,
            bounds,
            vocab_size,
            self._work,
            np.empty((count, self._weights.shape[6]), dtype=np.float32),
            tokens,
            others,
            margins,
            ids,
            probabilities,
            lengths,
            cancel.flag,
        )
        chains: list[Chain] = []
        for i, (item, row) in enumerate(zip(inputs, tokens.tolist(), strict=True)):
            drawn = list(itertools.takewhile(lambda token: token >= 0, row))
            n = len(drawn) if bounds[i] else 0
            supports = wire_form(ids[i, :n], probabilities[i, :n], lengths[i, :n].tolist()) if n else []
            told = others[i, : len(drawn), : item.num_others].tolist() if item.num_others else ()
            ahead = margins[i, : len(drawn)].tolist() if item.num_others else ()
            chains.append(Chain(drawn, supports, tuple(map(tuple, told)), ahead))
        return chains

    def _make_room(self, layout: Layout, cache: PagedCache, more_keys: int = 0) -> None:
        """See to it that the cache's entries and enough scratch are at hand."""
        if cache is not self._cache:
            assert cache.flat is not None
            self._cache, self._entries = cache, cache.flat.numpy()
        keys = int(layout.key_count.max()) + more_keys
        size = len(layout.ids) * self._per_row + keys * self._per_key + self._besides
        if size > len(self._work):
            self._work = aligned(size).view(np.float32)

    def pack(self) -> None:
        """Give up the model's own copies of the weights: it runs through this pass only from here on."""
        release(self._model)


def compiled_forward(
    model: Any, layers: Sequence[LayerLayout], max_model_len: int, *, any_threads: bool = False
) -> CompiledForward | None:
    """The compiled pass for a model that fused_eager.py covers; None where it does not serve.

    It uses one thread: with more of them oneDNN's products are faster, and it serves only if `any_threads`.
    """
    alike = len({(layer.num_kv_heads, layer.key_dim, layer.value_dim) for layer in layers}) == 1
    if (torch.get_num_threads() > 1 and not any_threads) or not alike or not fits(model):
        return None
    return CompiledForward(model, [layer.window for layer in layers], max_model_len)
