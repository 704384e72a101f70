"""Replays recorded passes of common shapes, padded to a bucket and cut back.

A bucket is recorded at its second use. Until then, and for passes that fit no bucket, the wrapped backend
computes the pass. A failed recording concerns its bucket alone (refusals.py).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from paceline.core.errors import in_one_line
from paceline.decoding.cuda.kernels import gumbel_kernels
from paceline.decoding.noise import MAX_NOISE
from paceline.engine.backends.cache_attention.fork import forks_of
from paceline.engine.backends.captured.buckets import (
    MAX_BATCH_ROWS,
    MAX_FEED,
    ROWS,
    Bucket,
    bucket_of,
    forked_bucket_of,
)
from paceline.engine.backends.captured.choosing import choosing_step, chosen_of
from paceline.engine.backends.captured.inputs import AnyBucket, Inputs, inputs_of
from paceline.engine.backends.captured.recording import Recorder, Step
from paceline.engine.backends.captured.refusals import Refusals
from paceline.engine.backends.captured.static_inputs import StaticInputs
from paceline.engine.backends.interface import Backend, Recordable, Skills
from paceline.engine.cache import PagedCache
from paceline.engine.cancel import CancelToken
from paceline.engine.device import free_bytes, is_out_of_memory
from paceline.engine.layout import PassLayout, SequenceInput
from paceline.engine.multi_step import Chain, ChainInput, ChainSkills
from paceline.kv import BlockTable

log = logging.getLogger(__name__)

PATIENCE: Final = 1
"""Uses of a bucket before it is recorded."""
_CHOOSES: Final = Skills(chains=ChainSkills(max_feed=MAX_FEED))
MAX_RECORDED: Final = 128
"""Maximum number of recordings; the least recently used one is dropped."""
PATIENCE_FULL: Final = 16
"""Uses of a bucket before it replaces another recording: with more buckets in turn than recordings, every
pass would otherwise record, which is slower than recording none."""


def room_for_logits(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The logits buffer of all recorded passes, [MAX_BATCH_ROWS, width]: only the latest logits are used."""
    return torch.empty(MAX_BATCH_ROWS, width, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class _Recording:
    inputs: Inputs
    replay: Step


class CapturedBackend:
    """Another backend's passes over one cache, recorded."""

    recordable = None

    def __init__(
        self,
        backend: Backend,
        recordable: Recordable,
        cache: PagedCache,
        recorder: Recorder,
        *,
        max_model_len: int,
        vocab_size: int,
        room: Tensor | None = None,
    ) -> None:
        """`recordable` is `backend`'s.

        `room` is a `room_for_logits` of at least that width, which may be shared; None makes one.
        """
        self._backend = backend
        self._forward, self._attention = recordable.forward, recordable.attention
        self._cache = cache
        self._recorder = recorder
        self._vocab_size = vocab_size
        self._room = room_for_logits(vocab_size, cache.dtype, cache.device) if room is None else room
        self._max_keys = min(max_model_len, cache.num_blocks * cache.block_size)
        self._recorded: OrderedDict[AnyBucket, _Recording] = OrderedDict()
        self._asked: dict[AnyBucket, int] = {}
        self._refusals = Refusals(lambda: free_bytes(cache.device))

    @property
    def skills(self) -> Skills:
        """It draws chains; those of a bucket that is not recorded are empty."""
        return _CHOOSES

    @property
    def usable(self) -> bool:
        """True unless a bucket that was to be recorded is not."""
        return not len(self._refusals)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the recorded backend's weights."""
        return self._backend.weight_bytes

    @property
    def num_recorded(self) -> int:
        """Number of recordings."""
        return len(self._recorded)

    def warm_up(self) -> None:
        """Record the passes of a single short sequence, so that the first request does not wait for it."""
        table, never = BlockTable(self._cache.pool), CancelToken()
        for rows in (rows for rows in ROWS if rows <= self._max_keys):
            for _ in range(1 + PATIENCE):
                self._cache.apply(table.reserve(rows))
                layout = PassLayout.of_sequences([SequenceInput(table, [0] * rows, rows)])
                self.forward(layout, self._cache, never)
                table.free()

    @torch.inference_mode()
    def forward(self, layout: PassLayout, cache: PagedCache, cancel: CancelToken) -> Tensor | None:
        """float32 [rows wanted, vocab_size], or the wrapped backend's result if nothing is replayed."""
        logits = self._replayed_pass(layout)
        if logits is None:
            return self._backend.forward(layout, cache, cancel)
        # The next replay overwrites the result of this one.
        return logits[: len(layout.wanted)].to(torch.float32, copy=True)

    @torch.inference_mode()
    def draw_chains(
        self, layout: PassLayout, inputs: Sequence[ChainInput], cache: PagedCache, cancel: CancelToken
    ) -> Sequence[Chain]:
        """Draw chains in groups: of equal steps, of tables or of branches, with or without distributions."""
        chosen: dict[int, Chain] = {}
        kinds = [
            (item.steps, bool(rows.own), None if item.draws is None else (item.draws.mass, item.draws.bound))
            for item, rows in zip(inputs, layout.sequences, strict=True)
        ]
        for kind in dict.fromkeys(kinds):
            alike = [i for i, own in enumerate(kinds) if own == kind]
            found = self._chains_alike(layout, alike, [inputs[i] for i in alike])
            chosen.update(zip(alike, found or [Chain(())] * len(alike), strict=True))
        return [chosen[i] for i in range(len(inputs))]

    def pack(self) -> bool:
        """As the wrapped backend."""
        return self._backend.pack()

    def _replayed_pass(self, layout: PassLayout) -> Tensor | None:
        sequences = layout.sequences
        if any(sequence.own for sequence in sequences):
            forks = forks_of(sequences)
            forked = forked_bucket_of(
                len(forks),
                max(len(fork.rows) for fork in forks),
                max(fork.num_shared for fork in forks),
                max(len(fork.own) for fork in forks),
                max_keys=self._max_keys,
                block_size=self._cache.block_size,
            )
            return self._replayed(forked, lambda inputs: inputs.write(layout, forks))
        bucket = self._bucket_of(
            len(sequences),
            max(sequence.count for sequence in sequences),
            max(sequence.stop for sequence in sequences),
            scattered=False,
        )
        return self._replayed(bucket, lambda inputs: inputs.write(layout))

    def _chains_alike(
        self, layout: PassLayout, which: Sequence[int], inputs: Sequence[ChainInput]
    ) -> list[Chain] | None:
        """Chains of one group, the sequences `which`."""
        sequences = [layout.sequences[i] for i in which]
        steps, noisy = inputs[0].steps, any(item.noise is not None for item in inputs)
        longest = max(sequence.stop for sequence in sequences) + steps - 1
        on_branches = bool(sequences[0].own)
        # Tables always have a second row, so that there are not two recordings of each shape.
        bucket = self._bucket_of(len(inputs), 1 if on_branches else MAX_FEED, longest, on_branches)
        if bucket is None:
            return None
        made_at_once = noisy and gumbel_kernels(self._cache.device) is None
        if made_at_once and bucket.sequences * steps * self._vocab_size > MAX_NOISE:
            return None
        ranks = min(max(item.num_others for item in inputs), self._vocab_size - 1)
        draws = inputs[0].draws
        support = None if draws is None else (draws.mass, min(draws.bound, self._vocab_size))
        bucket = replace(bucket, steps=steps, noisy=noisy, ranks=ranks, support=support)
        told = self._replayed(bucket, lambda static: static.write_chains(layout, sequences, inputs))
        # The only copy to the host.
        num_others = [item.num_others for item in inputs]
        return None if told is None else chosen_of(told.cpu().numpy(), num_others, bucket)

    def _bucket_of(self, sequences: int, rows: int, keys: int, scattered: bool) -> Bucket | None:
        return bucket_of(
            sequences,
            rows,
            keys,
            max_keys=self._max_keys,
            block_size=0 if scattered else self._cache.block_size,
            in_place=self._attention.in_place and not scattered,
        )

    def _replayed(self, bucket: AnyBucket | None, write: Callable[[Any], None]) -> Tensor | None:
        if bucket is None:
            return None
        recording = self._recorded.get(bucket)
        if recording is None:
            self._asked[bucket] = self._asked.get(bucket, 0) + 1
            patience = PATIENCE if len(self._recorded) < MAX_RECORDED else PATIENCE_FULL
            wanted = self._asked[bucket] > patience and self._refusals.allow(bucket)
            recording = self._record(bucket, write) if wanted else None
        else:
            self._recorded.move_to_end(bucket)
            write(recording.inputs)
        return None if recording is None else recording.replay()

    def _record(self, bucket: AnyBucket, write: Callable[[Any], None]) -> _Recording | None:
        try:
            inputs = inputs_of(bucket, self._cache, self._attention)
            # Recording runs the step, which writes to the cache, so the inputs must be the caller's.
            write(inputs)
            recording = _Recording(inputs, self._recorder(self._step(inputs)))
        except Exception as error:
            log.debug("%s cannot be recorded", bucket, exc_info=True)
            reason, out_of_memory = f"{type(error).__name__}: {in_one_line(error)}", is_out_of_memory(error)
        else:
            return self._keep(bucket, recording)
        # Not inside the exception handler: the traceback keeps the tensors of the step.
        if self._cache.device.type == "cuda":
            torch.cuda.empty_cache()
        self._refusals.add(bucket, reason, out_of_memory=out_of_memory)
        return None

    def _keep(self, bucket: AnyBucket, recording: _Recording) -> _Recording:
        if len(self._recorded) >= MAX_RECORDED:
            evicted, _ = self._recorded.popitem(last=False)
            del self._asked[evicted]
        self._recorded[bucket] = recording
        self._refusals.forget(bucket)
        return recording

    def _step(self, inputs: Inputs) -> Step:
        if isinstance(inputs, StaticInputs) and inputs.bucket.steps:
            return choosing_step(self._forward, inputs, self._vocab_size)
        return lambda: self._left_in_room(self._forward(inputs.written()))

    def _left_in_room(self, logits: Tensor) -> Tensor:
        """Copy the logits into the shared buffer; otherwise each recording would keep its own."""
        logits = logits[:, : self._vocab_size]
        if logits.dtype != self._room.dtype:
            # Logits with higher precision than the model's weights keep it.
            return logits
        return self._room[: len(logits), : self._vocab_size].copy_(logits)
