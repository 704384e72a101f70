"""Layouts of batches that are likely to come again, in bounded memory."""

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
"""Of all that a memo keeps: it lies beside a cache that leaves little of a device's memory."""
_TOKEN_BYTES: Final = 36
"""Of one token of a word: an int of Python's, and its place in the word."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """What is remembered of one batch. Of its requests that is no more than whether they are the same: their
    lists may be long, and nobody tells the memo that they ended."""

    params: tuple[weakref.ref[SamplingParams], ...]
    bad_words: tuple[Words, ...]
    """Held, so that no other object takes their identities."""
    row_params: RowParams
    nbytes: int


class RowParamsCache:
    """Batches seen lately: a sequence's parameters are the same object from step to step, and building
    tensors for them takes as long as a small model's layer.
    """

    def __init__(self, size: int = 64, most_bytes: int = MOST_BYTES) -> None:
        """`size`: batches remembered; all of them take `most_bytes` at most."""
        self._size = size
        self._most_bytes = most_bytes
        self._known: dict[tuple[object, ...], _Batch] = {}
        self.nbytes = 0
        """Of all that is remembered."""

    def build(
        self,
        params: Sequence[SamplingParams],
        rows: Sequence[int],
        device: torch.device,
        eos_token_ids: Sequence[int],
        bad_words: Sequence[Words],
    ) -> RowParams:
        """`RowParams.build`, or what it returned for the same objects."""
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
