"""Telling the server which requests nobody will resume.

A stream that is closed says so at once, so that the server knows it before any later call of the same client.
One that is dropped leaves it to a thread: it may be dropped inside the garbage collector, which may have
interrupted gRPC while it held its locks. Putting a name into a queue is safe everywhere. What is queued goes
before any later request of the same client too: that may have the same name.
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
    """A call that was made."""

    def result(self, timeout: float | None = None) -> Any: ...

    def add_done_callback(self, fn: Callable[[Any], None]) -> None: ...


Cancel = Callable[[str], _Answer]
"""Makes the call; what it raises of gRPC is of no interest: the server's own limit holds."""
_FAILURES = (grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError, ValueError)


class _Queue:
    """Names that wait for the thread, or for whoever goes before it."""

    def __init__(self, cancel: Cancel) -> None:
        self._cancel = cancel
        self._names: deque[str] = deque()
        self._signals: SimpleQueue[bool] = SimpleQueue()
        self._sending = threading.Lock()
        """Held from when a name is taken until its call is made: who has it next finds no name under way."""

    def put(self, name: str) -> None:
        """Takes no lock: the thread that does this may hold any."""
        self._names.append(name)
        self._signals.put(True)

    def end(self) -> None:
        """Of the thread, behind what is queued."""
        self._signals.put(False)

    def wait(self) -> bool:
        """For a name, which another one may take first; False is the end."""
        return self._signals.get()

    def send(self, most: int | None = None) -> list[_Answer]:
        """Make the calls of so many names, the oldest first; None is all that are here."""
        calls = []
        with self._sending:
            here = len(self._names)
            for _ in range(here if most is None else min(most, here)):
                with contextlib.suppress(*_FAILURES):
                    calls.append(self._cancel(self._names.popleft()))
        return calls


class Abandoning:
    """Cancels requests by their names."""

    def __init__(self, cancel: Cancel) -> None:
        self._cancel = cancel
        self._queue = _Queue(cancel)
        self._calls: set[_Answer] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Be ready. May be repeated."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_work, args=(self._queue,), name="paceline-abandon", daemon=True
                )
                self._thread.start()

    def now(self, request_id: str) -> None:
        """Make the call, and do not wait for its answer."""
        with contextlib.suppress(*_FAILURES):
            self._keep(self._cancel(request_id))

    def soon(self, request_id: str) -> None:
        """Leave it to the thread."""
        self._queue.put(request_id)

    def before_a_request(self) -> None:
        """Make the calls that were left to the thread."""
        for call in self._queue.send():
            self._keep(call)

    def _keep(self, call: _Answer) -> None:
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    def close(self, seconds: float) -> None:
        """Wait for all that was begun before, for at most so long. May be repeated."""
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
