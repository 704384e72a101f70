"""A scripted coordinator, and both clients behind one synchronous interface."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from paceline import AsyncClient, Client
from paceline.rpc.codec.status import to_status
from paceline.v1 import common_pb2, generation_pb2, generation_pb2_grpc

LOG = logging.getLogger(__name__)
Script = Callable[[generation_pb2.GenerateRequest, grpc.ServicerContext], Iterator[Any]]


def started(**changes: Any) -> generation_pb2.GenerateResponse:
    values = {
        "request_id": "r-1",
        "seed": 7,
        "num_prompt_tokens": 3,
        "acceptance_mode": common_pb2.ACCEPTANCE_MODE_BLOCK,
    } | changes
    return generation_pb2.GenerateResponse(started=generation_pb2.GenerateStarted(**values))


def chunk(index: int, token_ids: list[int], text: str, origins: list[int]) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(
        chunk=generation_pb2.GenerateChunk(index=index, token_ids=token_ids, text=text, origins=origins)
    )


def finished(completion_tokens: int = 4, **changes: Any) -> generation_pb2.GenerateResponse:
    values: dict[str, Any] = {
        "finish_reason": generation_pb2.FINISH_REASON_STOP,
        "stop_string": "END",
        "text": "!",
        "usage": generation_pb2.Usage(
            prompt_tokens=3, completion_tokens=completion_tokens, total_tokens=3 + completion_tokens
        ),
        "speculative_decoding": generation_pb2.SpeculativeDecoding(
            mean_acceptance_length=2.5,
            draft_acceptance_rate=0.75,
            acceptance_histogram=[0, 1, 1],
            num_spec_steps=2,
            num_draft_tokens=4,
            num_accepted_draft_tokens=3,
            acceptance_rate_per_position=[1.0, 0.5],
            num_rounds=3,
        ),
        "timings": generation_pb2.RoundTimings(
            draft_us=1_000_000,
            target_us=2_000_000,
            queue_us=3_000,
            wire_us=4_000,
            coordinator_us=5,
            total_us=3_007_005,
        ),
    } | changes
    return generation_pb2.GenerateResponse(finished=generation_pb2.GenerateFinished(**values))


ACCEPTED = generation_pb2.TOKEN_ORIGIN_ACCEPTED
CORRECTION = generation_pb2.TOKEN_ORIGIN_CORRECTION
TARGET = generation_pb2.TOKEN_ORIGIN_TARGET

GOOD = (
    started(),
    chunk(0, [11], "He", [TARGET]),
    chunk(1, [12, 13], "", [ACCEPTED, CORRECTION]),
    chunk(3, [14], "llo", [TARGET]),
    finished(),
)


def abort(context: grpc.ServicerContext, error: Exception) -> None:
    """End a call as the coordinator would."""
    context.abort_with_status(rpc_status.to_status(to_status(error)))


class FakeCoordinator(generation_pb2_grpc.GenerationServiceServicer):
    """Plays `script`; `ended` is set when a Generate call is over, whoever ended it."""

    address: str
    stop: Callable[[], None]
    """Be gone."""

    def __init__(self) -> None:
        self.script: Script = lambda _request, _context: iter(GOOD)
        self.error: Exception | None = None
        self.requests: list[Any] = []
        self.ended = threading.Event()
        self.release = threading.Event()
        self.blocked = threading.Event()
        self.cancelled: queue.SimpleQueue[str] = queue.SimpleQueue()

    def play(self, *messages: generation_pb2.GenerateResponse) -> None:
        """Send these and end well."""
        self.script = lambda _request, _context: iter(messages)

    def play_calls(self, *calls: tuple[Sequence[generation_pb2.GenerateResponse], Exception | None]) -> None:
        """Send the messages of each call in turn, the last ones from then on, and end as that call says."""
        left = list(calls)

        def script(_request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            messages, error = left.pop(0) if len(left) > 1 else left[0]
            yield from messages
            if error is not None:
                abort(context, error)

        self.script = script

    def play_and_fail(self, error: Exception, *messages: generation_pb2.GenerateResponse) -> None:
        """Send these, then end with `error` as the coordinator would."""

        self.play_calls((messages, error))

    def play_and_block(self, *messages: generation_pb2.GenerateResponse) -> None:
        """Send these, then nothing until the test is over."""

        def script(_request: Any, _context: grpc.ServicerContext) -> Iterator[Any]:
            yield from messages
            self.blocked.set()
            self.release.wait()

        self.script = script

    def Generate(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        self.requests.append(request)
        context.add_callback(self.ended.set)
        yield from self.script(request, context)

    def Cancel(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.cancelled.put(request.request_id)
        return generation_pb2.CancelResponse()

    def _unary(self, request: Any, context: Any, response: Any) -> Any:
        self.requests.append(request)
        if self.error is not None:
            abort(context, self.error)
        return response

    def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        ids = list(request.text.encode())
        return self._unary(request, context, generation_pb2.TokenizeResponse(token_ids=ids))

    def Detokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        text = bytes(request.token_ids).decode()
        return self._unary(request, context, generation_pb2.DetokenizeResponse(text=text))

    def ApplyChatTemplate(self, request: Any, context: Any) -> Any:  # noqa: N802
        text = "".join(f"[{message.role}]{message.content}" for message in request.messages)
        response = generation_pb2.ApplyChatTemplateResponse(token_ids=list(text.encode()))
        return self._unary(request, context, response)

    def ListModels(self, request: Any, context: Any) -> Any:  # noqa: N802
        model = generation_pb2.Model(id="tiny", max_model_len=64, vocabulary_size=256)
        return self._unary(request, context, generation_pb2.ListModelsResponse(models=[model]))

    def GetStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        response = generation_pb2.GetStatusResponse(
            coordinator=generation_pb2.CoordinatorStatus(
                address="c:1",
                process_id=9,
                running=2,
                num_speculative_tokens=4,
                acceptance_mode=common_pb2.ACCEPTANCE_MODE_COUPLED,
                finished_requests=5,
            ),
            workers=[
                generation_pb2.WorkerStatus(
                    address="t:1",
                    role="target",
                    state=generation_pb2.WORKER_STATE_READY,
                    info=common_pb2.WorkerInfo(
                        protocol_version=1,
                        role="target",
                        eos_token_ids=[1, 2],
                        cache=common_pb2.CacheInfo(block_size=16, total_blocks=8, free_blocks=7),
                    ),
                ),
                generation_pb2.WorkerStatus(
                    address="d:1", role="draft", state=generation_pb2.WORKER_STATE_LOST, reason="gone"
                ),
            ],
        )
        return self._unary(request, context, response)


@pytest.fixture(autouse=True)
def patient_cancellations(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, a cancellation arrives."""
    for module in ("links", "sync_calls", "async_calls"):
        monkeypatch.setattr(f"paceline.client.{module}.CANCEL_SECONDS", 30.0)


@contextlib.contextmanager
def serving(address: str = "127.0.0.1:0") -> Iterator[FakeCoordinator]:
    """A scripted coordinator at this address."""
    service = FakeCoordinator()
    executor = ThreadPoolExecutor(max_workers=4)
    grpc_server = grpc.server(executor)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(service, grpc_server)
    service.address = f"{address.partition(':')[0]}:{grpc_server.add_insecure_port(address)}"
    grpc_server.start()

    def stop() -> None:
        service.release.set()
        grpc_server.stop(None).wait()

    service.stop = stop
    try:
        yield service
    finally:
        stop()
        executor.shutdown()


@pytest.fixture
def server() -> Iterator[FakeCoordinator]:
    with serving() as service:
        yield service


@pytest.fixture
def servers() -> Iterator[tuple[FakeCoordinator, FakeCoordinator]]:
    """Two coordinators at one port of two loopback addresses."""
    with serving() as one, serving(f"127.0.0.2:{one.address.partition(':')[2]}") as other:
        yield one, other


class BlockingStream:
    """An AsyncGenerationStream driven from outside its event loop."""

    def __init__(self, runner: asyncio.Runner, stream: Any) -> None:
        self._runner = runner
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> BlockingStream:
        return self

    def __next__(self) -> Any:
        async def step() -> Any:
            return await anext(self._stream, None)

        value = self._runner.run(step())
        if value is None:
            raise StopIteration
        return value

    def close(self) -> None:
        self._runner.run(self._stream.aclose())


def _log(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """gRPC may hand any loop an event of one that is closed. What it raises then must keep nothing alive: its
    traceback, which is in a cycle with this context, has the frames in which a stream is being read."""
    LOG.error("%s", repr(context))
    error = context.get("exception")
    if error is not None:
        error.__traceback__ = None


class BlockingAsyncClient:
    """AsyncClient with Client's face, so that one test says what both must do."""

    def __init__(self, address: str, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self._runner.get_loop().set_exception_handler(_log)
        self._client = AsyncClient(address, **options)

    def stream(self, *args: Any, **kwargs: Any) -> BlockingStream:
        async def start() -> Any:
            return self._client.stream(*args, **kwargs)

        return BlockingStream(self._runner, self._runner.run(start()))

    def stream_chat(self, *args: Any, **kwargs: Any) -> BlockingStream:
        return BlockingStream(self._runner, self._runner.run(self._client.stream_chat(*args, **kwargs)))

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            async def run() -> Any:
                return await method(*args, **kwargs)

            return self._runner.run(run())

        return call

    def shut_down(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """A client of either kind for an address."""
    made: list[Any] = []

    def make(address: str, **options: Any) -> Any:
        kind = Client if request.param == "sync" else BlockingAsyncClient
        made.append(kind(address, **options))
        return made[-1]

    yield make
    for client in made:
        client.close() if isinstance(client, Client) else client.shut_down()


@pytest.fixture
def client(server: FakeCoordinator, connect: Callable[..., Any]) -> Any:
    """A client of either kind, connected to `server`, that shows every end of a stream."""
    return connect(server.address, resume_seconds=0)


@pytest.fixture
def messages() -> Any:
    """The builders of this file, which tests cannot import."""

    class Messages:
        good = GOOD
        started = staticmethod(started)
        chunk = staticmethod(chunk)
        finished = staticmethod(finished)
        accepted, correction, target = ACCEPTED, CORRECTION, TARGET
        abort = staticmethod(abort)

    return Messages


@pytest.fixture
def no_gc() -> Iterator[None]:
    """What is freed meanwhile is freed because nothing refers to it."""
    gc.disable()
    yield
    gc.enable()
