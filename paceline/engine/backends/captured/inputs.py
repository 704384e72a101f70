"""The inputs of a bucket of either kind."""

from __future__ import annotations

from paceline.engine.backends.cache_attention.interface import CacheAttention
from paceline.engine.backends.captured.buckets import Bucket, ForkedBucket
from paceline.engine.backends.captured.forked_inputs import ForkedInputs
from paceline.engine.backends.captured.static_inputs import StaticInputs
from paceline.engine.cache import PagedCache

AnyBucket = Bucket | ForkedBucket
Inputs = StaticInputs | ForkedInputs


def inputs_of(bucket: AnyBucket, cache: PagedCache, attention: CacheAttention) -> Inputs:
    """Inputs at fixed addresses, all 0."""
    if isinstance(bucket, ForkedBucket):
        return ForkedInputs(bucket, cache)
    return StaticInputs(bucket, cache, attention)
