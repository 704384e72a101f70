"""A dropped request is cancelled before another one with its id begins."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from paceline import Client
from paceline.client.abandoning import Abandoning

WAIT = 30


class Answer:
    """To a cancellation; it comes when `wait` returns."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def result(self, timeout: float | None = None) -> None:
        self._wait()

    def add_done_callback(self, fn: Callable[[Any], None]) -> None:
        pass


def test_a_dropped_stream_is_cancelled_before_reusing_its_id(
    messages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the cancellation would end the new request."""
    made: list[tuple[str, str]] = []
    waits, answered = threading.Event(), threading.Event()

    def wait() -> None:
        waits.set()
        assert answered.wait(WAIT)

    class Call:
        def __init__(self, request: Any) -> None:
            made.append(("generate", request.request_id))
            self._messages = iter([messages.started(request_id=request.request_id), *messages.good[1:]])

        def __next__(self) -> Any:
            return next(self._messages)

        def cancel(self) -> bool:
            return True

    class Stub:
        def __init__(self, channel: Any) -> None:
            self.Cancel = self

        def future(self, request: Any, **options: Any) -> Answer:
            made.append(("cancel", request.request_id))
            return Answer(wait)

        def Generate(self, request: Any, **options: Any) -> Call:  # noqa: N802
            return Call(request)

    monkeypatch.setattr("paceline.client.links.GenerationServiceStub", Stub)
    with Client("127.0.0.1:1") as client:
        for name in ("first", "mine"):
            for _ in client.stream("x", request_id=name):
                break
            assert waits.wait(WAIT)
        client.stream("x", request_id="mine").close()
        answered.set()
    assert made == [
        *[("generate", "first"), ("cancel", "first")],
        *[("generate", "mine"), ("cancel", "mine")],
        *[("generate", "mine")],
    ]


def test_a_request_waits_for_a_pending_cancellation() -> None:
    """The thread has taken it but not made the call yet."""
    order: list[str] = []
    taken, waits, goes_on = threading.Event(), threading.Event(), threading.Event()

    class Lock:
        inner = threading.Lock()

        def __enter__(self) -> None:
            if taken.is_set():
                waits.set()
            self.inner.acquire()

        def __exit__(self, *_: object) -> None:
            self.inner.release()

    def cancel() -> Answer:
        taken.set()
        assert goes_on.wait(WAIT)
        order.append("cancellation")
        return Answer(lambda: None)

    def request() -> None:
        abandoning.before_a_request()
        order.append("request")

    abandoning = Abandoning()
    abandoning._queue._sending = cast(Any, Lock())
    abandoning.start()
    abandoning.soon(cancel)
    assert taken.wait(WAIT)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(request)
        assert waits.wait(WAIT)
        goes_on.set()
        asking.result(WAIT)
    assert order == ["cancellation", "request"]
    abandoning.close(WAIT)
