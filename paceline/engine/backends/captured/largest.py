"""The steps whose recordings take the most memory, to be run once without being recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from torch import Tensor

from paceline.decoding.noise import MAX_NOISE
from paceline.engine.backends.captured.buckets import MAX_SEQUENCES, ROWS, Bucket, bucket_of
from paceline.engine.backends.captured.choosing import choosing_step
from paceline.engine.backends.captured.recording import Step
from paceline.engine.backends.captured.static_inputs import StaticInputs
from paceline.engine.backends.ragged_batch import RaggedBatch
from paceline.engine.cache import PagedCache

_RANKS: Final = 8
"""Next best tokens of a chain's steps."""


def largest_steps(
    recordable: Callable[[RaggedBatch], Tensor],
    cache: PagedCache,
    *,
    max_keys: int,
    vocab_size: int,
    chains: bool,
) -> list[Step]:
    """Steps over block 0 of the cache, which stands for all others; of `chains` too."""

    def step_of(bucket: Bucket) -> Step:
        def step() -> Tensor:
            inputs = StaticInputs(bucket, cache)
            if bucket.steps:
                return choosing_step(recordable, inputs, vocab_size)()
            return recordable(inputs.batch(inputs.ids, inputs.positions))

        return step

    buckets = largest_buckets(max_keys, cache.block_size)
    if chains:
        buckets += largest_chains(max_keys, cache.block_size, vocab_size)
    return [step_of(bucket) for bucket in buckets]


def largest_buckets(max_keys: int, block_size: int) -> list[Bucket]:
    """The one with the most keys together, and the one with the most rows."""
    found = [
        bucket
        for sequences in range(1, MAX_SEQUENCES + 1)
        for rows in ROWS
        for keys in (rows, max_keys)
        if (bucket := bucket_of(sequences, rows, keys, max_keys=max_keys, block_size=block_size))
    ]

    def by_keys(bucket: Bucket) -> tuple[int, int]:
        return bucket.sequences * bucket.keys, bucket.sequences * bucket.rows

    return [max(found, key=by_keys), max(found, key=lambda bucket: by_keys(bucket)[::-1])]


def largest_chains(max_keys: int, block_size: int, vocab_size: int) -> list[Bucket]:
    """Those of the most sequences, greedy and with noise."""
    largest = []
    for noisy, most in ((False, MAX_SEQUENCES), (True, min(MAX_SEQUENCES, MAX_NOISE // vocab_size))):
        # The number of sequences is rounded up.
        fitting = (
            bucket
            for sequences in range(most, 0, -1)
            if (bucket := bucket_of(sequences, 1, 1, max_keys=max_keys, block_size=block_size))
            and bucket.sequences <= most
        )
        if (bucket := next(fitting, None)) is not None:
            largest.append(replace(bucket, steps=1, noisy=noisy, ranks=min(_RANKS, vocab_size - 1)))
    return largest
