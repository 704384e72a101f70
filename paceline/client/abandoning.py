"""Cancelling abandoned requests, so that the server does not hold them for resumption.

A closed stream sends its cancellation at once, before any later call of the same client. A stream that is
garbage-collected leaves it to a thread: the collector may have interrupted gRPC while it held its locks, and
only putting an entry into a queue is safe there. Queued cancellations are also sent before any later request
of the same client, because that request may reuse the name.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

import grpc


class _Answer(Protocol):
    """A call in progress."""

    def result(self, timeout: float | None = None) -> Any: ...

    def add_done_callback(self, fn: Callable[[Any], None]) -> None: ...


Cancel = Callable[[], _Answer]
"""Starts the Cancel call of one request at its coordinator. gRPC errors are ignored: the server drops the
request after its own time limit."""
_FAILURES = (grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError, ValueError)


class _Queue:
    """Cancellations to be sent by the thread or before the next request."""

    def __init__(self) -> None:
        self._waiting: deque[Cancel] = deque()
        self._signals: SimpleQueue[bool] = SimpleQueue()
        self._sending = threading.Lock()
        """Held from taking an entry until its call has started, so that none is between both afterwards."""

    def put(self, cancel: Cancel) -> None:
        """Add an entry. Takes no lock, because the calling thread may hold any lock."""
        self._waiting.append(cancel)
        self._signals.put(True)

    def end(self) -> None:
        """Stop the thread after the queued entries."""
        self._signals.put(False)

    def wait(self) -> bool:
        """Wait for an entry, which another thread may take first. False means stop."""
        return self._signals.get()

    def send(self, most: int | None = None) -> list[_Answer]:
        """Start the calls of the oldest `most` entries; None means all."""
        calls = []
        with self._sending:
            here = len(self._waiting)
            for _ in range(here if most is None else min(most, here)):
                with contextlib.suppress(*_FAILURES):
                    calls.append(self._waiting.popleft()())
        return calls


class Abandoning:
    """Sends cancellations."""

    def __init__(self) -> None:
        self._queue = _Queue()
        self._calls: set[_Answer] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. Idempotent."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_work, args=(self._queue,), name="paceline-abandon", daemon=True
                )
                self._thread.start()

    def now(self, cancel: Cancel) -> None:
        """Cancel immediately without waiting for the answer."""
        with contextlib.suppress(*_FAILURES):
            self._keep(cancel())

    def soon(self, cancel: Cancel) -> None:
        """Let the thread cancel the request."""
        self._queue.put(cancel)

    def before_a_request(self) -> None:
        """Send all queued cancellations."""
        for call in self._queue.send():
            self._keep(call)

    def _keep(self, call: _Answer) -> None:
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    def close(self, seconds: float) -> None:
        """Wait for pending cancellations, for at most `seconds`. Idempotent."""
        end = time.monotonic() + seconds
        self._queue.end()
        for call in list(self._calls):
            with contextlib.suppress(*_FAILURES):
                call.result(max(0.0, end - time.monotonic()))
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))

    def __del__(self) -> None:
        self._queue.end()


def _work(queue: _Queue) -> None:
    while queue.wait():
        for call in queue.send(1):
            with contextlib.suppress(*_FAILURES):
                call.result()
