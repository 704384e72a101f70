"""The backend that computes a model's passes by one compiled function."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from paceline.decoding.sampling import wire_form
from paceline.engine.backends.compiled import compile_lock
from paceline.engine.backends.compiled.chain import decoder_chain
from paceline.engine.backends.compiled.flat_rows import FlatRows
from paceline.engine.backends.compiled.kernels import decoder_pass, scratch_of
from paceline.engine.backends.compiled.weights import Weights, aligned, fits, release
from paceline.engine.backends.fused_eager import covers
from paceline.engine.backends.interface import ServedModel, Skills
from paceline.engine.cache import PagedCache
from paceline.engine.cancel import CancelToken
from paceline.engine.layout import PassLayout
from paceline.engine.multi_step import Chain, ChainInput, ChainSkills

MAX_FEED: Final = 16
"""Maximum tokens that a chain may begin with: more belong to a prompt, and to a pass that can be shared."""


class CompiledBackend:
    """Computes passes by `decoder_pass` and chains by `decoder_chain`. Owns their scratch memory."""

    skills = Skills(
        row_invariant=True,
        cancellable=True,
        chains=ChainSkills(max_feed=MAX_FEED, row_by_row=True),
    )
    recordable = None

    def __init__(self, served: ServedModel) -> None:
        windows = [layer.window for layer in served.layers]
        self._weights = w = Weights.of(served.model, windows, served.max_positions)
        norms = w.shape, w.epsilon, w.scaling, w.windows
        self._model_of_pass = *norms, w.embedding, w.weights, w.gains, w.biases, w.head_gains, w.cos, w.sin
        self._model = served.model
        self._vocab_size = served.vocab_size
        self._per_row, self._per_key, self._besides = scratch_of(self._weights.shape.tolist())
        self._work = np.empty(0, dtype=np.float32)
        self._cache: PagedCache | None = None
        self._entries = np.empty((0, 0), dtype=np.float32)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a decode step reads."""
        return self._weights.weights.nbytes

    def forward(self, layout: PassLayout, cache: PagedCache, cancel: CancelToken) -> Tensor | None:
        """float32 [rows wanted, vocabulary in whole tiles]; None if it was cancelled in its first half."""
        rows = FlatRows.of(layout)
        self._make_room(rows, cache)
        logits = np.zeros((len(rows.wanted), self._weights.shape[6]), dtype=np.float32)
        done = compile_lock.call(
            decoder_pass,
            *self._model_of_pass,
            self._entries,
            *rows,
            self._work,
            logits,
            cancel.flag,
        )
        return torch.from_numpy(logits) if done else None

    def draw_chains(
        self, layout: PassLayout, inputs: Sequence[ChainInput], cache: PagedCache, cancel: CancelToken
    ) -> Sequence[Chain]:
        """The chain of every input; all fed tokens are then in `cache`."""
        rows, vocab_size = FlatRows.of(layout), self._vocab_size
        count, longest = len(inputs), inputs[0].steps
        self._make_room(rows, cache, longest)
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
            *rows,
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

    def _make_room(self, rows: FlatRows, cache: PagedCache, more_keys: int = 0) -> None:
        """Provide the cache's entries and enough scratch."""
        if cache is not self._cache:
            assert cache.flat is not None
            self._cache, self._entries = cache, cache.flat.numpy()
        keys = int(rows.key_count.max()) + more_keys
        size = len(rows.ids) * self._per_row + keys * self._per_key + self._besides
        if size > len(self._work):
            self._work = aligned(size).view(np.float32)

    def pack(self) -> bool:
        """Release the model's own copies of the weights: it then runs through this backend only."""
        release(self._model)
        return True


def compiled_backend(served: ServedModel) -> CompiledBackend | None:
    """The compiled backend, for supported float32 models on a CPU with widths of whole tiles.

    It uses one thread: with more threads oneDNN's products are faster, and it serves only if `deterministic`
    is set.
    """
    alike = len({(layer.num_kv_heads, layer.key_dim, layer.value_dim) for layer in served.layers}) == 1
    enough = torch.get_num_threads() == 1 or served.deterministic
    if not enough or not alike or not covers(served.model) or not fits(served.model):
        return None
    return CompiledBackend(served)
