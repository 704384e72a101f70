"""Batches through recorded passes: padded to a bucket, replayed, cut back.

A bucket is recorded when it is asked for again; until then, and for what no bucket holds, the
answer is that the caller has to compute it himself. A model that cannot be recorded is not tried again.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from paceline.decoding.noise import MAX_NOISE
from paceline.engine.backends.captured.buckets import MAX_BATCH_ROWS, Bucket, bucket_of
from paceline.engine.backends.captured.choosing import choosing_step, chosen_of
from paceline.engine.backends.captured.recording import Recorder, Step
from paceline.engine.backends.captured.static_inputs import Slate
from paceline.engine.batch import RaggedBatch, SequenceInput
from paceline.engine.branches import BranchInput
from paceline.engine.cache import PagedCache
from paceline.engine.multi_step import Chain, ChainInput
from paceline.kv import Branch

log = logging.getLogger(__name__)

PATIENCE: Final = 1
"""How often a bucket is left to the caller before it is recorded."""
MAX_RECORDED: Final = 128
"""Recordings kept; the one used longest ago goes."""
PATIENCE_FULL: Final = 16
"""The same where another recording must go for it: more buckets in turn than are kept would else be recorded
in every pass, which takes longer than none recorded."""


def room_for_logits(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Where every recorded pass leaves its logits, [MAX_BATCH_ROWS, width]: only the last one's are used."""
    return torch.empty(MAX_BATCH_ROWS, width, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class _Recording:
    slate: Slate
    replay: Step


class CapturedPasses:
    """The recordings of one model on one cache."""

    def __init__(
        self,
        forward: Callable[[RaggedBatch], Tensor],
        cache: PagedCache,
        recorder: Recorder,
        *,
        max_model_len: int,
        vocab_size: int,
        room: Tensor | None = None,
    ) -> None:
        """`forward` gives a batch's logits, [rows wanted, at least vocab_size].

        `room` is a `room_for_logits` of at least that width, which others may use as well; None makes one.
        """
        self._forward = forward
        self._cache = cache
        self._recorder = recorder
        self._vocab_size = vocab_size
        self._room = room_for_logits(vocab_size, cache.dtype, cache.device) if room is None else room
        self._max_keys = min(max_model_len, cache.num_blocks * cache.block_size)
        self._recorded: OrderedDict[Bucket, _Recording] = OrderedDict()
        self._asked: dict[Bucket, int] = {}
        self.usable = True
        """False once a recording has failed."""

    @property
    def num_recorded(self) -> int:
        """Recordings there are."""
        return len(self._recorded)

    def sequences(self, inputs: Sequence[SequenceInput]) -> Tensor | None:
        """Logits of a batch with its reservations, [sum of num_logits, vocab_size]; to be copied."""
        bucket = bucket_of(
            len(inputs),
            max(len(item.token_ids) for item in inputs),
            max(item.table.length + len(item.token_ids) for item in inputs),
            max_keys=self._max_keys,
            block_size=self._cache.block_size,
        )
        logits = self._replayed(bucket, lambda slate: slate.write_sequences(inputs))
        return None if logits is None else logits[: sum(item.num_logits for item in inputs)]

    def branches(self, inputs: Sequence[BranchInput]) -> Tensor | None:
        """Logits of one row a branch with its reservation, [len(inputs), vocab_size]; to be copied."""
        keys = max(item.branch.length for item in inputs) + 1
        bucket = bucket_of(len(inputs), 1, keys, max_keys=self._max_keys)
        logits = self._replayed(bucket, lambda slate: slate.write_branches(inputs))
        return None if logits is None else logits[: len(inputs)]

    def chains(self, inputs: Sequence[ChainInput]) -> list[Chain] | None:
        """What each of these chose; they have equally many steps, all on branches or none; no `draws`."""
        scattered = isinstance(inputs[0].end, Branch)
        steps, noisy = inputs[0].steps, any(item.noise is not None for item in inputs)
        bucket = bucket_of(
            len(inputs),
            1,
            max(item.end.length for item in inputs) + steps,
            max_keys=self._max_keys,
            block_size=0 if scattered else self._cache.block_size,
        )
        if bucket is None or (noisy and bucket.sequences * steps * self._vocab_size > MAX_NOISE):
            return None
        ranks = min(max(item.num_others for item in inputs), self._vocab_size - 1)
        bucket = replace(bucket, steps=steps, noisy=noisy, ranks=ranks)
        told = self._replayed(bucket, lambda slate: slate.write_chains(inputs))
        # The one copy to the host.
        return None if told is None else chosen_of(told.tolist(), [item.num_others for item in inputs])

    def _replayed(self, bucket: Bucket | None, write: Callable[[Slate], None]) -> Tensor | None:
        if bucket is None or not self.usable:
            return None
        recording = self._recorded.get(bucket)
        if recording is None:
            self._asked[bucket] = self._asked.get(bucket, 0) + 1
            patience = PATIENCE if len(self._recorded) < MAX_RECORDED else PATIENCE_FULL
            recording = self._record(bucket, write) if self._asked[bucket] > patience else None
        else:
            self._recorded.move_to_end(bucket)
            write(recording.slate)
        return None if recording is None else recording.replay()

    def _record(self, bucket: Bucket, write: Callable[[Slate], None]) -> _Recording | None:
        slate = Slate(bucket, self._cache)
        # Recording runs the step, which writes to the cache: it must be what the caller wants written.
        write(slate)
        try:
            recording = _Recording(slate, self._recorder(self._step(slate)))
        except Exception:
            log.exception("%s cannot be recorded; going on with passes that are launched one by one", bucket)
            self.usable = False
            self._recorded.clear()
            return None
        if len(self._recorded) >= MAX_RECORDED:
            evicted, _ = self._recorded.popitem(last=False)
            del self._asked[evicted]
        self._recorded[bucket] = recording
        return recording

    def _step(self, slate: Slate) -> Step:
        if slate.bucket.steps:
            return choosing_step(self._forward, slate, self._vocab_size)
        return lambda: self._left_in_room(self._forward(slate.batch(slate.ids, slate.positions)))

    def _left_in_room(self, logits: Tensor) -> Tensor:
        """The logits where the next replay of any recording overwrites them: else each recording would keep
        room for its own.
        """
        logits = logits[:, : self._vocab_size]
        if logits.dtype != self._room.dtype:
            # A model whose logits have more bits than its weights keeps them.
            return logits
        return self._room[: len(logits), : self._vocab_size].copy_(logits)
