"""A bounded cache of batch layouts."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from paceline.core.types import SamplingParams
from paceline.decoding.rows.bad_words import Words
from paceline.decoding.rows.row_params import RowParams

MOST_BYTES: Final = 1 << 26
"""Default memory bound, since the key-value cache leaves little device memory."""
_TOKEN_BYTES: Final = 36
"""Memory of one token of a bad word: a Python int and its slot in the tuple."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """A cached batch. It holds only weak references to the parameters, because their lists may be long and
    the cache does not learn when a request ends."""

    params: tuple[weakref.ref[SamplingParams], ...]
    bad_words: tuple[Words, ...]
    """Strong references, so that no other object can get the same ids."""
    row_params: RowParams
    nbytes: int


class RowParamsCache:
    """Layouts of recent batches, by identity of the parameters.

    A sequence keeps its parameter object from step to step, and building a layout takes as long as a layer of
    a small model.
    """

    def __init__(self, size: int = 64, most_bytes: int = MOST_BYTES) -> None:
        """Keeps at most `size` batches and `most_bytes` bytes."""
        self._size = size
        self._most_bytes = most_bytes
        self._known: dict[tuple[object, ...], _Batch] = {}
        self.nbytes = 0
        """Bytes of all cached batches."""

    def build(
        self,
        params: Sequence[SamplingParams],
        rows: Sequence[int],
        device: torch.device,
        eos_token_ids: Sequence[int],
        bad_words: Sequence[Words],
    ) -> RowParams:
        """`RowParams.build`, cached by the identity of the arguments."""
        eos = tuple(eos_token_ids)
        key = (device, eos, tuple(rows), tuple(map(id, params)), tuple(map(id, bad_words)))
        known = self._known.get(key)
        if known is not None:
            if all(ref() is p for ref, p in zip(known.params, params, strict=True)):
                return known.row_params
            self._forget(key)
        built = RowParams.build(params, rows, device, eos_token_ids=eos, bad_words=bad_words)
        nbytes = built.nbytes + _TOKEN_BYTES * sum(len(word) for words in bad_words for word in words)
        if nbytes <= self._most_bytes:
            while self._known and (len(self._known) >= self._size or self.nbytes + nbytes > self._most_bytes):
                self._forget(next(iter(self._known)))
            self._known[key] = _Batch(tuple(map(weakref.ref, params)), tuple(bad_words), built, nbytes)
            self.nbytes += nbytes
        return built

    def _forget(self, key: tuple[object, ...]) -> None:
        self.nbytes -= self._known.pop(key).nbytes
