"""A synchronous stream is read on after a signal handler raised during a wait."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import grpc
import pytest

from paceline import Client, GenerationChunk
from paceline.client import sync_stream
from paceline.client.resuming import Resuming
from paceline.client.sync_stream import GenerationStream
from paceline.core.errors import CancelledError

WAIT = 30
GRPC_WAITS = "grpc/_common.py"
"""The frame in which gRPC waits for a message that it has asked for."""


class Struck(Exception):  # noqa: N818 - what a handler raises is no error of this project
    """What the handler raises."""


class Striking:
    """Strikes whoever waits inside gRPC for a message that does not come, once for each `begin`."""

    def __init__(self) -> None:
        self.struck = threading.Event()
        self.error: BaseException = Struck()
        self.taken = 0
        """Messages that the stream was given."""
        self.sent = 0
        self._over = False
        self._lock = threading.Lock()

    def handle(self, _number: int, frame: FrameType | None) -> None:
        while frame is not None and not frame.f_code.co_filename.endswith(GRPC_WAITS):
            frame = frame.f_back
        if frame is not None and self.taken == self.sent and not self.struck.is_set():
            self.struck.set()
            raise self.error

    def begin(self, sent: int) -> None:
        """In a thread of the server, which sent so many messages: signals come until one has struck."""
        self.struck.clear()
        self.sent += sent
        while not self.struck.is_set():
            with self._lock:
                if self._over:
                    return
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            self.struck.wait(0.01)

    def end(self) -> None:
        """No signal comes any more, also where the test failed: without a handler one ends the process."""
        with self._lock:
            self._over = True


@pytest.fixture
def striking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Striking]:
    it, feed = Striking(), Resuming.feed

    def counted(self: Resuming, message: Any) -> GenerationChunk | None:
        chunk = feed(self, message)
        it.taken += 1
        return chunk

    monkeypatch.setattr(Resuming, "feed", counted)
    before = signal.signal(signal.SIGUSR1, it.handle)
    yield it
    it.end()
    signal.signal(signal.SIGUSR1, before)


def strikes_after(server: Any, striking: Striking, messages: Any, *counts: int) -> None:
    """Of each call: the messages of which the client has none, and a strike in front of one of them."""
    calls = list(counts)

    def script(request: Any, _context: grpc.ServicerContext) -> Iterator[Any]:
        have = request.resume_from[0] if request.resume_from else 0
        rest = [m for m in messages.good[1:] if not m.HasField("chunk") or m.chunk.index >= have]
        told = [messages.good[0], *rest]
        count = calls.pop(0) if calls else len(told)
        yield from told[:count]
        if count < len(told):
            striking.begin(count)
            server.release.wait()

    server.script = script


def read(stream: GenerationStream, error: type[BaseException] = Struck) -> tuple[list[GenerationChunk], int]:
    """All of its chunks, and how often whoever read them was struck."""
    chunks: list[GenerationChunk] = []
    strikes = 0
    while True:
        try:
            chunks.append(next(stream))
        except StopIteration:
            return chunks, strikes
        except error:
            strikes += 1


@pytest.mark.parametrize("error", [Struck(), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_an_interrupted_reader_gets_each_token_once(
    server: Any, messages: Any, striking: Striking, error: BaseException
) -> None:
    striking.error = error
    strikes_after(server, striking, messages, 2, 1, 2)
    with Client(server.address) as client:
        stream = client.stream("x", {"max_tokens": 4})
        chunks, strikes = read(stream, type(error))
    assert strikes == stream.num_resumes == 3
    assert [(c.index, c.token_ids) for c in chunks] == [(0, (11,)), (1, (12, 13)), (3, (14,)), (4, ())]
    assert stream.result.text == "Hello!"
    assert [tuple(request.resume_from) for request in server.requests] == [(), (1,), (1,), (3,)]


def test_an_interrupt_after_the_last_chunk_changes_nothing(
    server: Any, messages: Any, striking: Striking
) -> None:
    def script(_request: Any, _context: grpc.ServicerContext) -> Iterator[Any]:
        yield from messages.good
        striking.begin(len(messages.good))
        server.release.wait()

    server.script = script
    with Client(server.address) as client:
        stream = client.stream("x")
        chunks, strikes = read(stream)
    assert strikes == 1
    assert "".join(chunk.text for chunk in chunks) == "Hello!"
    assert len(server.requests) == 1


@pytest.mark.parametrize(("resume_seconds", "count"), [(0, 2), (5, 0)], ids=["no resumes", "not begun"])
def test_an_interrupted_stream_without_resumes_ends(
    server: Any, messages: Any, striking: Striking, resume_seconds: int, count: int
) -> None:
    strikes_after(server, striking, messages, count)
    with Client(server.address, resume_seconds=resume_seconds) as client:
        stream = client.stream("x")
        with pytest.raises(CancelledError, match="interrupted by an exception") as caught:
            read(stream)
        assert caught.value.message == sync_stream.INTERRUPTED
        assert list(stream) == []
        assert stream.result is None
    assert len(server.requests) == 1
    assert server.ended.wait(WAIT), "its call was cancelled"


def test_an_interrupt_during_a_chunk_ends_the_stream(
    server: Any, messages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunk may be half processed, so its position is unknown."""
    server.play_and_block(*messages.good[:3])
    with Client(server.address) as client:
        stream = client.stream("x")
        assert next(stream).token_ids == (11,)
        feed: Callable[[Any], Any] = stream._resuming.feed

        def struck(message: Any) -> None:
            feed(message)
            raise Struck

        monkeypatch.setattr(stream._resuming, "feed", struck)
        with pytest.raises(Struck):
            next(stream)
        monkeypatch.setattr(stream._resuming, "feed", feed)
        with pytest.raises(CancelledError, match="interrupted by an exception"):
            next(stream)
        assert list(stream) == []
    assert len(server.requests) == 1
    assert server.cancelled.get(timeout=WAIT) == server.requests[0].request_id
