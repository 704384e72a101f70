"""The steps whose recordings take the most memory, to be run once without being recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from torch import Tensor

from paceline.core.limits import MAX_SUPPORT
from paceline.decoding.noise import MAX_NOISE
from paceline.engine.backends.captured.buckets import (
    FORKED_ROWS,
    MAX_BATCH_ROWS,
    MAX_FEED,
    MAX_SEQUENCES,
    ROWS,
    Bucket,
    ForkedBucket,
    bucket_of,
    forked_bucket_of,
)
from paceline.engine.backends.captured.choosing import choosing_step
from paceline.engine.backends.captured.inputs import AnyBucket, inputs_of
from paceline.engine.backends.captured.recording import Step
from paceline.engine.backends.captured.static_inputs import StaticInputs
from paceline.engine.backends.interface import Recordable
from paceline.engine.cache import PagedCache

Fitting = Callable[[int, int, int], Bucket | None]
"""The bucket of a number of sequences, rows and keys; None if there is none."""

_RANKS: Final = 8
"""Next best tokens of a chain's steps."""


def largest_steps(
    recordable: Recordable,
    cache: PagedCache,
    *,
    max_keys: int,
    vocab_size: int,
    chains: bool,
) -> list[Step]:
    """Steps over block 0 of the cache, which stands for all others; of `chains` too."""

    def step_of(bucket: AnyBucket) -> Step:
        def step() -> Tensor:
            inputs = inputs_of(bucket, cache, recordable.attention)
            if isinstance(inputs, StaticInputs) and inputs.bucket.steps:
                return choosing_step(recordable.forward, inputs, vocab_size)()
            return recordable.forward(inputs.written())

        return step

    fitting = partial(
        bucket_of, max_keys=max_keys, block_size=cache.block_size, in_place=recordable.attention.in_place
    )
    buckets: list[AnyBucket] = [*largest_buckets(fitting, max_keys)]
    buckets += largest_forks(max_keys, cache.block_size)
    if chains:
        # On branches they gather keys even where tables are read in place.
        most_keys, _ = largest_buckets(partial(bucket_of, max_keys=max_keys), max_keys)
        buckets += [*largest_chains(fitting, vocab_size), replace(most_keys, rows=1, steps=1)]
    return [step_of(bucket) for bucket in buckets]


def largest_buckets(fitting: Fitting, max_keys: int) -> list[Bucket]:
    """The one with the most keys together, and the one with the most rows."""
    found = [
        bucket
        for sequences in range(1, MAX_SEQUENCES + 1)
        for rows in ROWS
        for keys in (rows, max_keys)
        if (bucket := fitting(sequences, rows, keys))
    ]

    def by_keys(bucket: Bucket) -> tuple[int, int]:
        return bucket.sequences * bucket.keys, bucket.sequences * bucket.rows

    return [max(found, key=by_keys), max(found, key=lambda bucket: by_keys(bucket)[::-1])]


def largest_forks(max_keys: int, block_size: int) -> list[ForkedBucket]:
    """Those of trees and branches with the most keys, with the most rows, and with the largest mask."""
    found = [
        bucket
        for rows in FORKED_ROWS
        for forks in range(1, MAX_BATCH_ROWS // rows + 1)
        for keys in (1, *(1 << n for n in range(max_keys.bit_length())), max_keys)
        if (bucket := forked_bucket_of(forks, rows, keys, max_keys=max_keys, block_size=block_size))
    ]
    sizes: list[Callable[[ForkedBucket], tuple[int, int]]] = [
        lambda b: (b.forks * b.keys, b.forks * b.rows),
        lambda b: (b.forks * b.rows, b.forks * b.keys),
        lambda b: (b.forks * b.rows * b.keys, b.forks * b.keys),
    ]
    return list(dict.fromkeys(max(found, key=size) for size in sizes))


def largest_chains(fitting: Fitting, vocab_size: int) -> list[Bucket]:
    """Those of the most sequences: greedy, with noise, and drawn with distributions.

    Their first step takes up to two tokens.
    """
    largest = []
    support = 1.0, min(MAX_SUPPORT, vocab_size)
    for noisy, drawn_from in ((False, None), (True, None), (False, support)):
        most = min(MAX_SEQUENCES, MAX_NOISE // vocab_size) if noisy else MAX_SEQUENCES
        # The number of sequences is rounded up.
        buckets = (
            bucket
            for sequences in range(most, 0, -1)
            if (bucket := fitting(sequences, MAX_FEED, MAX_FEED)) and bucket.sequences <= most
        )
        if (bucket := next(buckets, None)) is not None:
            ranks = min(_RANKS, vocab_size - 1)
            largest.append(replace(bucket, steps=1, noisy=noisy, ranks=ranks, support=drawn_from))
    return largest
