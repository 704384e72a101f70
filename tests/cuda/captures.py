"""Streams, captures and the debug mode for waits of the pretended device, as they are after a failure too.

A wait makes a capture invalid. Ending an invalid one is an error, after which torch's allocator believes that
it continues: so it is in torch's source (CUDAGraph.cpp).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final, Protocol

SEEN_BY_NO_DEBUG_MODE: Final = {"synchronize", "event"}
"""Waits that torch's debug mode for waits lets pass."""

Pool = tuple[int, int]


class Tape(Protocol):
    """A recording."""

    valid: bool


class Stream:
    """There is one in truth."""

    def wait_stream(self, other: Stream) -> None:
        """It has nothing to wait for."""


class Captures:
    """What is captured, where, and what torch believes of it."""

    def __init__(self) -> None:
        self.open: Tape | None = None
        """The recording that is being made."""
        self._underway: dict[Pool, Tape] = {}
        """The captures that the allocator believes to continue."""
        self._sync_debug_mode = 0
        self._first_stream = self._stream = Stream()
        self._num_pools = 0

    def check_sound(self) -> None:
        """Raises AssertionError if something was left as it may be during a recording only."""
        assert self.open is None, "a capture is open"
        assert not self._underway, "the allocator believes that a capture continues"
        assert not self.elsewhere, "the capture stream is current"
        assert self._sync_debug_mode == 0, "waits are errors"

    @property
    def elsewhere(self) -> bool:
        """Another stream is current than at first."""
        return self._stream is not self._first_stream

    @property
    def pool(self) -> Pool | None:
        """The memory that the open capture takes."""
        return next((pool for pool, tape in self._underway.items() if tape is self.open), None)

    def wait(self, why: str, place: str) -> None:
        """Raises RuntimeError where the host must not wait."""
        if self.open is not None:
            self.open.valid = False
            raise RuntimeError(f"operation not permitted when stream is capturing: {why} at {place}")
        if self._sync_debug_mode == 2 and why not in SEEN_BY_NO_DEBUG_MODE:
            raise RuntimeError(f"called a synchronizing CUDA operation: {why} at {place}")

    def begin(self, tape: Tape, pool: Pool) -> None:
        """As torch, raises RuntimeError on the stream that is current at first, and for a pool in use."""
        if not self.elsewhere:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        if pool in self._underway:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self._underway[pool] = self.open = tape

    def end(self, tape: Tape) -> None:
        """Raises RuntimeError for a capture that is not open, or is invalid: it is then no longer open."""
        if self.open is not tape:
            raise RuntimeError("CUDA error: operation not permitted")
        self.open = None
        if not tape.valid:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.end_allocate_to_pool(0, next(pool for pool, own in self._underway.items() if own is tape))

    def end_allocate_to_pool(self, device: int, pool: Pool) -> None:
        """Raises RuntimeError unless the allocator believes that one continues in this pool."""
        if pool not in self._underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        del self._underway[pool]

    def instead_of_cuda(self) -> dict[str, Any]:
        """What is used of `torch.cuda`."""
        return {
            "Stream": lambda *_: Stream(),
            "current_stream": lambda *_: self._stream,
            "set_stream": self._set_stream,
            "stream": self._on_stream,
            "graph_pool_handle": self._new_pool,
            "get_sync_debug_mode": lambda: self._sync_debug_mode,
            "set_sync_debug_mode": self._set_sync_debug_mode,
        }

    def _set_stream(self, stream: Stream) -> None:
        self._stream = stream

    @contextlib.contextmanager
    def _on_stream(self, stream: Stream) -> Iterator[None]:
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before

    def _new_pool(self) -> Pool:
        self._num_pools += 1
        return 0, self._num_pools

    def _set_sync_debug_mode(self, mode: int | str) -> None:
        self._sync_debug_mode = ("default", "warn", "error").index(mode) if isinstance(mode, str) else mode
