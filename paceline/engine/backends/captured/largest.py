"""The steps whose recordings take the most memory, to be run once without being recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from torch import Tensor

from paceline.core.limits import MAX_SUPPORT
from paceline.decoding.noise import MAX_NOISE
from paceline.engine.backends.captured.buckets import MAX_FEED, MAX_SEQUENCES, ROWS, Bucket, bucket_of
from paceline.engine.backends.captured.choosing import choosing_step
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

    def step_of(bucket: Bucket) -> Step:
        def step() -> Tensor:
            inputs = StaticInputs(bucket, cache, recordable.attention)
            if bucket.steps:
                return choosing_step(recordable.forward, inputs, vocab_size)()
            return recordable.forward(inputs.batch(inputs.ids, inputs.positions))

        return step

    fitting = partial(
        bucket_of, max_keys=max_keys, block_size=cache.block_size, in_place=recordable.attention.in_place
    )
    # Trees and branches: their entries lie anywhere, so they are gathered.
    scattered = partial(bucket_of, max_keys=max_keys)
    buckets = largest_buckets(fitting, max_keys) + largest_buckets(scattered, max_keys)
    if chains:
        buckets += largest_chains(fitting, vocab_size)
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
