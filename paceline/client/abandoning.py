"""Telling the server which requests nobody will resume.

A stream that is closed says so at once, so that the server knows it before any later call of the same client.
One that is dropped leaves it to a thread: it may be dropped inside the garbage collector, which may have
interrupted gRPC while it held its locks. Putting a name into a queue is safe everywhere.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

import grpc


class _Answer(Protocol):
    """A call that was made."""

    def result(self, timeout: float | None = None) -> Any: ...

    def add_done_callback(self, fn: Callable[[Any], None]) -> None: ...


Cancel = Callable[[str], _Answer]
"""Makes the call; what it raises of gRPC is of no interest: the server's own limit holds."""
_FAILURES = (grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError, ValueError)


class Abandoning:
    """Cancels requests by their names."""

    def __init__(self, cancel: Cancel) -> None:
        self._cancel = cancel
        self._names: SimpleQueue[str | None] = SimpleQueue()
        self._calls: set[_Answer] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Be ready. May be repeated."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_work, args=(self._names, self._cancel), name="paceline-abandon", daemon=True
                )
                self._thread.start()

    def now(self, request_id: str) -> None:
        """Make the call, and do not wait for its answer."""
        with contextlib.suppress(*_FAILURES):
            call = self._cancel(request_id)
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    def soon(self, request_id: str) -> None:
        """Leave it to the thread."""
        self._names.put(request_id)

    def close(self, seconds: float) -> None:
        """Wait for all that was begun before, for at most so long. May be repeated."""
        end = time.monotonic() + seconds
        self._names.put(None)
        for call in list(self._calls):
            with contextlib.suppress(*_FAILURES):
                call.result(max(0.0, end - time.monotonic()))
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))

    def __del__(self) -> None:
        self._names.put(None)


def _work(names: SimpleQueue[str | None], cancel: Cancel) -> None:
    while (name := names.get()) is not None:
        with contextlib.suppress(*_FAILURES):
            cancel(name).result()
