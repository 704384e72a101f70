"""A broken stream resumes by itself: without gaps or repeats, for a bounded time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import pytest
from harness.refusals import refused

from paceline import AcceptanceMode, AsyncClient, Client, GenerationResult
from paceline.client.assembler import StreamAssembler
from paceline.client.channel import ClientClosedError
from paceline.client.links import AsyncLink, SyncLink
from paceline.client.resuming import ResumeBackoff, Resuming
from paceline.core.clock import ManualClock
from paceline.core.errors import (
    AlreadyExistsError,
    CancelledError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    PacelineError,
    ResourceExhaustedError,
    StaleEpochError,
    UnavailableError,
)
from paceline.rpc import codec
from paceline.v1 import common_pb2, generation_pb2

WAIT = 30
CUT = UnavailableError("the connection is lost")
REFUSALS = [
    InvalidArgumentError("top_p", "must be in (0, 1]"),
    AlreadyExistsError("request_id", "is running already"),
    ResourceExhaustedError("queue is full"),
    StaleEpochError("resumed by another call"),
    InternalError("the model gave NaN"),
    DeadlineExceededError("too late"),
]


def at_once(seconds: float = 30.0) -> ResumeBackoff:
    return ResumeBackoff(seconds, first=0.0)


class Cutting:
    """Serves the good messages, but loses its client after so many of them, call by call."""

    def __init__(self, server: Any, messages: Any, *cuts: int) -> None:
        self.messages = list(messages.good)
        self.abort = messages.abort
        self.cuts = list(cuts)
        server.script = self.play

    def play(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        call = codec.generate_request_from_proto(request)
        yield self.messages[0]
        have = call.resumption.resume_from[0] if call.resumption is not None else 0
        rest = [m for m in self.messages[1:] if not m.HasField("chunk") or m.chunk.index >= have]
        cut = self.cuts.pop(0) if self.cuts else len(rest)
        yield from rest[:cut]
        if cut < len(rest):
            self.abort(context, CUT)


@pytest.fixture
def resuming(server: Any, connect: Callable[..., Any]) -> Any:
    """A client of either kind that does not wait before it resumes."""
    return with_backoff(connect(server.address), at_once())


def with_backoff(client: Any, backoff: ResumeBackoff) -> Any:
    inner = client if isinstance(client, Client | AsyncClient) else client._client
    inner._backoff = backoff
    return client


def test_a_resumed_result_equals_the_undisturbed_one(server: Any, resuming: Any, messages: Any) -> None:
    whole = resuming.generate("x", {"max_tokens": 4})
    Cutting(server, messages, 1, 0, 1)
    stream = resuming.stream("x", {"max_tokens": 4})
    chunks = list(stream)
    assert [(c.index, c.token_ids) for c in chunks] == [(0, (11,)), (1, (12, 13)), (3, (14,)), (4, ())]
    assert stream.result == whole
    assert isinstance(stream.result, GenerationResult)
    assert stream.num_resumes == 3


def test_a_resume_sends_the_same_request_and_the_tokens(server: Any, resuming: Any, messages: Any) -> None:
    """It has the first request's id, the server's seed and mode, and the received tokens."""
    Cutting(server, messages, 2)
    resuming.generate("x", {"temperature": 0.5, "stop": ["END"]}, speculation={"num_speculative_tokens": 3})
    first, second = (codec.generate_request_from_proto(request) for request in server.requests)
    assert first.resumable
    assert second.resumable
    assert first.request_id == second.request_id != ""
    assert (first.resumption, first.sampling.seed, first.speculation.mode) == (None, None, None)
    assert second.resumption == codec.Resumption((3,), ((11, 12, 13),))
    assert second.sampling.seed == 7
    assert second.speculation == replace(first.speculation, acceptance=AcceptanceMode.BLOCK)
    assert second.prompt == first.prompt


def test_a_stream_without_an_end_is_resumed(server: Any, resuming: Any, messages: Any) -> None:
    server.play_calls((messages.good[:3], None), ((messages.good[0], *messages.good[3:]), None))
    assert resuming.generate("x").text == "Hello!"


def test_an_exhausted_budget_names_the_last_index(
    server: Any, connect: Callable[..., Any], messages: Any
) -> None:
    client = with_backoff(connect(server.address), ResumeBackoff(0.3, first=0.1))
    Cutting(server, messages, 2, *[0] * 100)
    with pytest.raises(UnavailableError, match="connection is lost") as caught:
        client.generate("x")
    assert caught.value.last_index == 2
    assert 2 <= len(server.requests) < 20


@pytest.mark.parametrize("error", REFUSALS, ids=lambda e: type(e).__name__)
def test_a_refusal_is_not_retried(server: Any, resuming: Any, messages: Any, error: PacelineError) -> None:
    server.play_and_fail(error, *messages.good[:2])
    with pytest.raises(type(error)):
        resuming.generate("x")
    assert len(server.requests) == 1


def test_a_stream_that_has_not_begun_is_retried(server: Any, resuming: Any, messages: Any) -> None:
    """By its id: the server may have begun it, and the answer been lost."""
    server.play_calls(((), CUT), ((), CUT), (messages.good, None))
    assert resuming.generate("x", {"n": 1}).text == "Hello!"
    assert [list(request.resume_from) for request in server.requests] == [[], [0], [0]]
    assert len({request.request_id for request in server.requests}) == 1
    assert not any(request.received for request in server.requests)


def test_a_callers_request_id_starts_anew(server: Any, resuming: Any, messages: Any) -> None:
    """The id may belong to another request, which must not be taken over."""
    server.play_calls(((), CUT), (messages.good, None))
    resuming.generate("x", request_id="mine")
    assert [list(request.resume_from) for request in server.requests] == [[], []]


def test_a_server_never_reached_is_not_retried(connect: Callable[..., Any]) -> None:
    client = with_backoff(connect("127.0.0.1:1"), ResumeBackoff(3600.0, first=3600.0, longest=3600.0))
    stream = client.stream("x")
    with pytest.raises(UnavailableError):
        list(stream)
    assert stream.num_resumes == 0


def test_a_server_once_reached_is_waited_for(server: Any, connect: Callable[..., Any]) -> None:
    """After any successful call, the next one is retried for the whole budget."""
    client = with_backoff(connect(server.address), ResumeBackoff(0.5, first=0.1))
    client.models()
    server.stop()
    stream = client.stream("x")
    with pytest.raises(UnavailableError):
        list(stream)
    assert stream.num_resumes > 0


def test_an_unexplained_cut_is_resumed(server: Any, resuming: Any, messages: Any) -> None:
    """gRPC cuts calls like this while it stops. A CANCELLED with our details is an answer."""

    def script(request: Any, context: Any) -> Iterator[Any]:
        if request.resume_from:
            yield from (messages.good[0], *messages.good[2:])
        yield from messages.good[:2]
        context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")

    server.script = script
    assert resuming.generate("x").text == "Hello!"
    server.play_and_fail(CancelledError("the client cancelled the request"), *messages.good[:2])
    with pytest.raises(CancelledError, match="the client cancelled"):
        resuming.generate("x")


def test_an_unresumed_cut_is_not_a_cancellation(
    server: Any, client: Any, messages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No caller cancelled anything."""

    def script(_request: Any, context: Any) -> Iterator[Any]:
        yield messages.good[0]
        context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")

    def cut(_request: Any, context: Any, _response: Any) -> Any:
        context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")

    server.script = script
    with pytest.raises(UnavailableError, match="the server ended the call"):
        client.generate("x")
    monkeypatch.setattr(server, "_unary", cut)
    with pytest.raises(UnavailableError, match="the server ended the call"):
        client.models()


def test_a_refused_resume_raises_the_refusal(server: Any, resuming: Any, messages: Any) -> None:
    server.play_calls((messages.good[:2], CUT), ((), InternalError("the model gave NaN")))
    with pytest.raises(InternalError):
        resuming.generate("x")


def test_a_resume_without_room_is_retried(server: Any, resuming: Any, messages: Any) -> None:
    refusals = [ResourceExhaustedError("queue is full"), ResourceExhaustedError("rate limit", 0.001)]
    whole = resuming.generate("x", {"max_tokens": 4})
    cutting = Cutting(server, messages, 2)

    def script(request: Any, context: Any) -> Iterator[Any]:
        if request.resume_from and refusals:
            messages.abort(context, refusals.pop())
        yield from cutting.play(request, context)

    server.script = script
    assert resuming.generate("x", {"max_tokens": 4}) == whole
    assert not refusals


def test_resuming_another_request_breaks_the_protocol(server: Any, resuming: Any, messages: Any) -> None:
    server.play_calls((messages.good[:2], None), ((messages.started(seed=8), *messages.good[2:]), None))
    with pytest.raises(InternalError, match="another request"):
        resuming.generate("x")


def test_the_deadline_covers_all_resumes(server: Any, connect: Callable[..., Any], messages: Any) -> None:
    """A pause that would outlast it is cut short."""
    client = with_backoff(connect(server.address), ResumeBackoff(600.0, first=600.0, longest=600.0))

    def script(request: Any, context: Any) -> Iterator[Any]:
        if request.resume_from:
            server.release.wait()
        yield from messages.good[:2]
        messages.abort(context, CUT)

    server.script = script
    with pytest.raises(DeadlineExceededError):
        client.generate("x", timeout=0.5)


def test_no_retry_goes_past_the_deadline(
    server: Any, connect: Callable[..., Any], messages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(server.address, resume_seconds=10_000)
    kind = SyncLink if isinstance(client, Client) else AsyncLink
    made, calls = kind.generate, []

    def count(link: Any, request: generation_pb2.GenerateRequest, timeout: float | None) -> Any:
        calls.append(timeout)
        return made(link, request, timeout)

    monkeypatch.setattr(kind, "generate", count)
    server.play_and_block(*messages.good[:2])
    stream = client.stream("x", timeout=2.0)
    assert next(stream).text == "He"
    server.stop()
    with pytest.raises(DeadlineExceededError):
        list(stream)
    assert len(calls) <= 5, "pauses of 0.1, 0.2, 0.4, 0.8 s at least"
    assert stream.num_resumes == len(calls) - 1
    assert list(stream) == []


# ---- closing while a stream waits to be asked for again ------------------------------------------------


def in_an_hour(pausing: Callable[[], None]) -> ResumeBackoff:
    """Says when the pause begins."""

    def uniform() -> float:
        pausing()
        return 0.0

    return ResumeBackoff(7200.0, first=3600.0, longest=3600.0, uniform=uniform)


@pytest.mark.parametrize("closed", ["stream", "client"])
def test_closing_in_the_pause_ends_it_at_once(server: Any, messages: Any, closed: str) -> None:
    Cutting(server, messages, 1)
    paused = threading.Event()
    client = with_backoff(Client(server.address), in_an_hour(paused.set))
    stream = client.stream("x")
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(list, stream)
        assert paused.wait(WAIT)
        {"stream": stream, "client": client}[closed].close()
        with pytest.raises(CancelledError):
            reading.result(WAIT)
    assert stream.num_resumes == 0, "nothing was asked for again"
    client.close()


def test_an_interrupt_in_the_pause_resumes_at_once(
    server: Any, messages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken call must not be read again: that would cost another resume."""
    Cutting(server, messages, 1)
    client = with_backoff(Client(server.address), in_an_hour(lambda: None))
    stream = client.stream("x")
    chunks = [next(stream)]

    class Struck(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            monkeypatch.undo()
            raise KeyboardInterrupt

    monkeypatch.setattr(stream, "_closed", Struck())
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    chunks += stream
    assert "".join(chunk.text for chunk in chunks) == "Hello!"
    assert stream.num_resumes == 1
    assert [tuple(request.resume_from) for request in server.requests] == [(), (1,)]
    client.close()


@pytest.mark.parametrize("closed", ["stream", "client"])
async def test_closing_an_async_stream_in_the_pause_ends_it(server: Any, messages: Any, closed: str) -> None:
    Cutting(server, messages, 1)
    paused = asyncio.Event()
    client = with_backoff(AsyncClient(server.address), in_an_hour(paused.set))
    stream = client.stream("x")

    async def read() -> list[Any]:
        return [chunk async for chunk in stream]

    async with asyncio.timeout(WAIT):
        reading = asyncio.create_task(read())
        await paused.wait()
        await {"stream": stream.aclose, "client": client.close}[closed]()
        with pytest.raises(CancelledError):
            await reading
    assert stream.num_resumes == 0, "nothing was asked for again"
    await client.close()


@pytest.mark.parametrize("closed", ["stream", "client"])
def test_closing_during_a_resume_ends_the_stream(
    server: Any, messages: Any, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    """The stream once its next call is made, the client before that."""
    Cutting(server, messages, 1)
    client = with_backoff(Client(server.address), at_once())
    made = SyncLink.generate

    def close_meanwhile(
        link: SyncLink, request: generation_pb2.GenerateRequest, timeout: float | None
    ) -> Any:
        if request.resume_from and closed == "client":
            client.close()
        call = made(link, request, timeout)
        if request.resume_from:
            stream.close()
        return call

    monkeypatch.setattr(SyncLink, "generate", close_meanwhile)
    stream = client.stream("x")
    with pytest.raises(CancelledError):
        list(stream)
    assert list(stream) == []
    if closed == "stream":
        told = [server.cancelled.get(timeout=WAIT) for _ in range(2)]
        assert told == [server.requests[0].request_id] * 2, "the second one after the call that it is about"
    client.close()


# ---- telling the server that nobody comes back ---------------------------------------------------------


def test_closing_a_stream_cancels_by_request_id(server: Any, resuming: Any, messages: Any) -> None:
    server.play_and_block(*messages.good[:2])
    stream = resuming.stream("x")
    next(stream)
    stream.close()
    stream.close()
    if not isinstance(resuming, Client):
        resuming.close()  # lets its event loop run
    assert server.cancelled.get(timeout=WAIT) == server.requests[0].request_id
    resuming.close()
    assert server.cancelled.empty()


async def test_a_stream_closed_by_another_task_is_cancelled_once(server: Any, messages: Any) -> None:
    """A second cancellation may end a new request of the same id."""
    server.play_and_block(*messages.good[:2])
    async with asyncio.timeout(WAIT), AsyncClient(server.address) as client:
        stream = client.stream("x", request_id="mine")
        await anext(stream)
        reading = asyncio.create_task(stream.__anext__())
        await asyncio.sleep(0)
        await stream.aclose()
        with pytest.raises(CancelledError):
            await reading
    assert server.cancelled.get(timeout=WAIT) == "mine"
    assert server.cancelled.empty()


@pytest.mark.parametrize("dropped", ["the stream", "its client as well"])
def test_dropping_a_stream_cancels_by_request_id(server: Any, messages: Any, dropped: str) -> None:
    server.play_and_block(*messages.good[:2])
    client = Client(server.address)
    stream = client.stream("x")
    next(stream)
    if dropped == "its client as well":
        del client
    del stream
    assert server.cancelled.get(timeout=WAIT) == server.requests[0].request_id


async def test_dropping_an_async_stream_cancels_by_request_id(server: Any, messages: Any) -> None:
    server.play_and_block(*messages.good[:2])
    async with AsyncClient(server.address) as client:
        async for _ in client.stream("x"):
            break
    assert server.cancelled.get(timeout=WAIT) == server.requests[0].request_id


def test_closing_the_client_cancels_its_requests_first(server: Any, resuming: Any, messages: Any) -> None:
    server.play_and_block(*messages.good[:2])
    streams = [resuming.stream("x") for _ in range(3)]
    for stream in streams:
        next(stream)
    resuming.close()
    told = {server.cancelled.get(timeout=WAIT) for _ in streams}
    assert told == {request.request_id for request in server.requests}


def test_an_ended_request_is_not_cancelled(server: Any, resuming: Any, messages: Any) -> None:
    resuming.generate("x")
    server.play_and_fail(AlreadyExistsError("request_id", "is running already"))
    with pytest.raises(AlreadyExistsError):
        resuming.generate("x", request_id="a neighbour's")
    resuming.close()
    assert server.cancelled.empty()


def test_without_resumes_the_request_is_not_resumable(server: Any, client: Any, messages: Any) -> None:
    client.generate("x")
    assert not server.requests[0].resumable
    assert server.requests[0].request_id == ""


def test_a_client_closes_after_an_interrupt_inside_grpc(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes before gRPC starts the thread that ends the call."""

    def interrupt(_state: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.client.sync_calls.CLOSE_SECONDS", 0.2)
    client = Client(server.address)
    monkeypatch.setattr("grpc._channel._run_channel_spin_thread", interrupt)
    with pytest.raises(KeyboardInterrupt):
        client.generate("x")
    client.close()
    client.close()


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "5", True, None])
def test_invalid_resume_seconds_are_refused(value: Any) -> None:
    for kind in (Client, AsyncClient):
        with refused("resume_seconds"):
            kind("127.0.0.1:1", resume_seconds=value)


# ---- the pure parts ------------------------------------------------------------------------------------


def test_pauses_double_to_a_limit_with_jitter() -> None:
    late, early = ResumeBackoff(uniform=lambda: 0.0), ResumeBackoff(uniform=lambda: 1.0)
    assert [late.pause(i) for i in range(7)] == [0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]
    assert [early.pause(i) for i in range(3)] == [0.1, 0.2, 0.4]
    assert late.pause(100_000) == 2.0


def begun(messages: Any, timeout: float | None = None, clock: ManualClock | None = None) -> Resuming:
    request = generation_pb2.GenerateRequest(text="x")
    resuming = Resuming(request, timeout, ResumeBackoff(1.0, uniform=lambda: 0.0), clock or ManualClock())
    for message in messages.good[:3]:
        resuming.feed(message)
    return resuming


def test_the_last_pause_ends_with_the_budget(messages: Any) -> None:
    clock = ManualClock()
    resuming = begun(messages, clock=clock)
    pauses = []
    while (pause := resuming.pause_after(CUT)) is not None:
        pauses.append(pause)
        clock.advance(pause)
    assert pauses == pytest.approx([0.2, 0.4, 0.4])


def test_a_chunk_renews_budget_and_pauses(messages: Any) -> None:
    clock = ManualClock()
    resuming = begun(messages, clock=clock)
    assert resuming.pause_after(CUT) == 0.2
    clock.advance(0.9)
    resuming.feed(messages.good[3])
    assert resuming.pause_after(CUT) == 0.2
    clock.advance(0.9)
    assert resuming.pause_after(CUT) == pytest.approx(0.1)
    clock.advance(0.1)
    assert resuming.pause_after(CUT) is None


def test_only_time_without_a_server_uses_the_budget(messages: Any) -> None:
    """A request in the server's queue is being served, though no chunk comes."""
    clock = ManualClock()
    resuming = begun(messages, clock=clock)
    assert resuming.pause_after(CUT) == 0.2
    clock.advance(0.5)
    resuming.next_request()
    resuming.feed(messages.good[0])
    clock.advance(3600.0)
    assert resuming.pause_after(CUT) == 0.4
    clock.advance(0.5)
    assert resuming.pause_after(CUT) is None, "a server that begins and breaks makes no progress"


def test_a_requested_pause_stays_within_the_budget(messages: Any) -> None:
    clock = ManualClock()
    resuming = begun(messages, clock=clock)
    assert resuming.pause_after(CUT) == 0.2
    clock.advance(0.2)
    assert resuming.pause_after(ResourceExhaustedError("rate limit", 0.6)) == pytest.approx(0.6)
    clock.advance(0.6)
    assert resuming.pause_after(ResourceExhaustedError("rate limit", 60.0)) == pytest.approx(0.2)
    clock.advance(0.2)
    assert resuming.pause_after(ResourceExhaustedError("rate limit", 60.0)) is None


def test_a_closed_client_does_not_resume(messages: Any) -> None:
    assert begun(messages).pause_after(ClientClosedError("closed")) is None


def test_a_request_is_abandoned_once(messages: Any) -> None:
    resuming = begun(messages)
    assert resuming.abandon() == resuming.request.request_id
    assert resuming.pause_after(CancelledError("closed")) is None
    assert resuming.abandon() is None


def test_a_request_closed_before_its_start_is_still_cancelled(messages: Any) -> None:
    """Otherwise the server would hold it for nobody."""
    resuming = Resuming(generation_pb2.GenerateRequest(text="x", request_id="mine"), None, ResumeBackoff())
    assert resuming.abandon() is None, "the name may be that of another request"
    resuming.feed(messages.started(request_id="mine"))
    assert resuming.abandon() == "mine"
    assert resuming.abandon() is None


def test_a_pause_cut_by_the_deadline_is_the_last(messages: Any) -> None:
    """No further pauses of a millisecond follow."""
    clock = ManualClock(100.0)
    resuming = begun(messages, 0.3, clock)
    assert resuming.pause_after(CUT) == 0.2
    clock.advance(0.2)
    assert resuming.next_request().resume_from == [3]
    assert resuming.pause_after(CUT) == pytest.approx(0.1)
    clock.advance(0.1)
    with pytest.raises(DeadlineExceededError):
        resuming.next_request()
    assert resuming.num_resumes == 1
    clock.advance(1.0)
    late = begun(messages, 0.3, clock)
    clock.advance(1.0)
    assert late.pause_after(CUT) == 0.0
    with pytest.raises(DeadlineExceededError):
        late.next_request()


def test_the_timeout_is_what_remains_of_the_deadline(messages: Any) -> None:
    clock = ManualClock(100.0)
    resuming = begun(messages, 10.0, clock)
    assert resuming.timeout == 10.0
    clock.advance(9.9)
    assert resuming.pause_after(CUT) == pytest.approx(0.1)
    clock.advance(5.0)
    assert 0 < (resuming.timeout or 0) < 0.01


def report(token_id: int) -> Any:
    return generation_pb2.PositionLogprobs(
        tokens=[generation_pb2.Logprob(token_id=token_id, logprob=-1.0, rank=1)]
    )


def test_a_repeated_prompt_is_reported_once() -> None:
    """Cut before the first token: echo and the prompt's log-probabilities begin again."""
    started = generation_pb2.GenerateResponse(
        started=generation_pb2.GenerateStarted(
            request_id="r",
            seed=7,
            num_prompt_tokens=4,
            acceptance_mode=common_pb2.ACCEPTANCE_MODE_COUPLED,
            prompt_token_ids=[1, 2, 3, 4],
        )
    )

    def chunk(**values: Any) -> Any:
        return generation_pb2.GenerateResponse(chunk=generation_pb2.GenerateChunk(**values))

    sampling = common_pb2.SamplingParams(prompt_logprobs=0, echo=True)
    assembler = StreamAssembler(sampling)
    assembler.feed(started)
    first = [assembler.feed(chunk(text="ab")), assembler.feed(chunk(prompt_logprobs=[report(2), report(3)]))]
    assert assembler.resume() == (7, codec.Resumption((0,), ((),)))
    assembler.feed(started)
    second = [
        assembler.feed(chunk(text="ab")),
        assembler.feed(chunk(prompt_logprobs=[report(2), report(3), report(4)])),
        assembler.feed(chunk(token_ids=[9], text="c", origins=[generation_pb2.TOKEN_ORIGIN_TARGET])),
    ]
    assert second[0] is None
    chunks = [chunk for chunk in (*first, *second) if chunk is not None]
    assert "".join(c.text for c in chunks) == "abc"
    assert [next(iter(p)) for c in chunks for p in c.prompt_logprobs] == [2, 3, 4]
    # With a token here nothing of the prompt comes again.
    assembler.resume()
    assembler.feed(started)
    last = assembler.feed(
        chunk(index=1, token_ids=[9], text="d", origins=[generation_pb2.TOKEN_ORIGIN_TARGET])
    )
    assert last.text == "d"


def test_an_ended_choice_may_end_again(messages: Any) -> None:
    sampling = common_pb2.SamplingParams(n=2)
    assembler = StreamAssembler(sampling)
    started = messages.started(seeds=[7, 8])
    for message in (started, messages.chunk(0, [11], "a", [messages.target]), messages.finished(1)):
        assembler.feed(message)
    assert assembler.resume()[1] == codec.Resumption((1, 0), ((11,), ()))
    assembler.feed(started)
    assert assembler.feed(messages.finished(1)) is None
    with pytest.raises(InternalError, match="continues after its end"):
        assembler.feed(messages.finished(1))
    other = messages.chunk(0, [12], "b", [messages.target])
    other.chunk.choice = 1
    assembler.feed(other)
    assembler.feed(messages.finished(1, choice=1))
    assert [output.text for output in assembler.require_result().outputs] == ["a!", "b!"]
