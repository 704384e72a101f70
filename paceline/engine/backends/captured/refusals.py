"""The buckets that could not be recorded: for good, or until more memory is free."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from paceline.engine.backends.captured.inputs import AnyBucket

log = logging.getLogger(__name__)

USES_BEFORE_RETRY: Final = 64
"""Uses of a bucket until a recording that ran out of memory may be tried again, doubled with each failure: a
failed recording takes longer than some passes."""
MORE_FREE: Final = 64 << 20
"""Bytes that must be free beyond those with which it failed: other processes' use varies by a few."""


@dataclass(slots=True)
class _Lack:
    free: int
    """Bytes that were free after the failure, which did not suffice."""
    patience: int
    uses: int = 0


class Refusals:
    """Decides which buckets may be recorded. Everything else goes on being recorded."""

    def __init__(self, free_bytes: Callable[[], int | None]) -> None:
        """`free_bytes`: what a recording could allocate now; None if unknown, and then it is not retried."""
        self._free_bytes = free_bytes
        self._for_good: set[AnyBucket] = set()
        self._lacks: dict[AnyBucket, _Lack] = {}
        self._told: set[str] = set()

    def __len__(self) -> int:
        """Number of buckets that are not recorded at present."""
        return len(self._for_good) + len(self._lacks)

    def allow(self, bucket: AnyBucket) -> bool:
        """Whether to record the bucket at this use of it."""
        if bucket in self._for_good:
            return False
        lack = self._lacks.get(bucket)
        if lack is None:
            return True
        lack.uses += 1
        if lack.uses % lack.patience:
            return False
        return (self._free_bytes() or 0) >= lack.free + MORE_FREE

    def add(self, bucket: AnyBucket, reason: str, *, out_of_memory: bool) -> None:
        """Note a failure, when its memory has been given back. Each reason is logged once."""
        if out_of_memory:
            before = self._lacks.get(bucket)
            patience = USES_BEFORE_RETRY if before is None else 2 * before.patience
            self._lacks[bucket] = _Lack(self._free_bytes() or 0, patience)
            new = before is None
            reason = "it ran out of memory, and is tried again when more is free"
        else:
            self._for_good.add(bucket)
            self._lacks.pop(bucket, None)
            new = reason not in self._told
            self._told.add(reason)
        if new:
            log.warning(
                "passes of %s are launched one by one, as they cannot be recorded: %s", bucket, reason
            )

    def forget(self, bucket: AnyBucket) -> None:
        """The bucket is recorded now."""
        self._lacks.pop(bucket, None)
