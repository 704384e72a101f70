"""A gRPC call whose client does not read ends, and the client gets the status when it reads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import grpc
import pytest

from coordinator.api.grpc.service import Context, GenerationService
from coordinator.app import Coordinator
from coordinator.requests.generation import Generation
from coordinator.sequence.ledger import Commit
from paceline.client.requests import generate_request
from paceline.core.clock import ManualClock
from paceline.core.errors import CancelledError, InternalError, PacelineError, UnavailableError
from paceline.core.types import TokenOrigin
from paceline.rpc.codec.status import abort, from_rpc_error
from paceline.v1 import generation_pb2_grpc
from paceline.v1.generation_pb2 import GenerateResponse, GenerateStarted

SECONDS = 30.0
CHUNKS = 400
NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))


async def turn() -> None:
    """Let the others go on."""
    await asyncio.sleep(0)


async def read_all(call: Any, told: list[Any]) -> None:
    while (response := await call.read()) is not grpc.aio.EOF:
        told.append(response)


@contextlib.asynccontextmanager
async def narrow(served: Coordinator) -> AsyncIterator[Any]:
    """A stub of the gRPC face, over a connection that holds little of what is not read."""
    server = grpc.aio.server()
    service = GenerationService(served, cast("Any", None))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with (
            asyncio.timeout(SECONDS),
            grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=NARROW) as channel,
        ):
            yield generation_pb2_grpc.GenerationServiceStub(channel)
    finally:
        await server.stop(None)


def cut(served: Coordinator) -> None:
    served.dispatcher.abort_all(UnavailableError("the sequence was cut"))


def fail(served: Coordinator) -> None:
    served.dispatcher.abort_all(InternalError("the request broke"))


def cancel(served: Coordinator) -> None:
    served.requests.cancel("", "r")


@pytest.mark.parametrize("sends", [True, False], ids=["while it sends", "before it sends"])
@pytest.mark.parametrize(
    ("end", "kind", "says"),
    [
        (cut, UnavailableError, "does not read"),
        (fail, InternalError, "the request broke"),
        (cancel, CancelledError, "the client cancelled"),
    ],
)
async def test_a_call_that_cannot_send_ends_with_its_status(
    end: Callable[[Coordinator], None],
    kind: type[PacelineError],
    says: str,
    served: Coordinator,
    *,
    sends: bool,
) -> None:
    """Cancelling only the handler would leave the client waiting. UNAVAILABLE is kept for what a client
    may resume."""
    clock = ManualClock()
    served._clock = served.requests._clock = clock
    served.requests._unread_timeout = 60.0
    async with narrow(served) as stub:
        request = generate_request("def", {"max_tokens": 50}, None, None)
        request.request_id, request.resumable = "r", True
        call: Any = stub.Generate(request)
        assert (await call.read()).WhichOneof("part") == "started"
        (running,) = served.dispatcher._sequences.values()
        for index in range(CHUNKS):
            running.parts.put_nowait(Commit(index, (5,), (TokenOrigin.TARGET,), 4096 * "x"))
        end(served)
        while sends and running.parts.qsize() > CHUNKS:  # and the error
            await turn()
        served.requests.expire()
        clock.advance(60.0)
        served.requests.expire()
        told: list[Any] = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(call, told)
        error = from_rpc_error(caught.value)
        assert type(error) is kind
        assert says in error.message
        assert len(told) < CHUNKS
        assert len(served.requests._readers) == 0
        assert len(served.requests) == (1 if end is fail else 0)


async def test_a_call_that_cannot_send_its_first_message_ends(
    served: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers must have been sent, or no status can be."""
    began: list[GenerateResponse] = []

    def long_started(generation: Generation) -> GenerateResponse:
        began.append(GenerateResponse(started=GenerateStarted(prompt_token_ids=[1 << 20] * (1 << 18))))
        return began[0]

    monkeypatch.setattr("coordinator.api.grpc.service._started", long_started)
    async with narrow(served) as stub:
        request = generate_request("def", {"max_tokens": 50}, None, None)
        call: Any = stub.Generate(request)
        while not began:
            await turn()
        (reader,) = served.requests._readers
        assert reader.task is not None
        served.requests._end_call(reader.task)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(call, [])
        assert type(from_rpc_error(caught.value)) is UnavailableError


@pytest.mark.parametrize("gone", [True, False], ids=["gone", "not reading"])
async def test_only_a_connected_client_is_told_it_did_not_read(
    served: Coordinator, monkeypatch: pytest.MonkeyPatch, *, gone: bool
) -> None:
    """gRPC refuses a status for a call that its client has ended."""
    aborted: list[BaseException] = []

    async def noting(context: Context, error: BaseException) -> None:
        aborted.append(error)
        await abort(context, error)

    monkeypatch.setattr("coordinator.api.grpc.service.abort", noting)
    async with narrow(served) as stub:
        call: Any = stub.Generate(generate_request("def", {"max_tokens": 50}, None, None))
        assert (await call.read()).WhichOneof("part") == "started"
        (reader,) = served.requests._readers
        assert reader.task is not None
        if gone:
            call.cancel()
        else:
            served.requests._end_call(reader.task)
        while not reader.task.done():
            await turn()
        for _ in range(10):
            await turn()  # where a status would be sent behind its end
    assert len(aborted) == (0 if gone else 1)


async def test_a_client_gone_before_its_first_message_is_no_error(
    served: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    class Gone:
        async def send_initial_metadata(self, metadata: object) -> None:
            raise RuntimeError("the call has ended")

        def time_remaining(self) -> None: ...

    service = GenerationService(served, cast("Any", None))
    request = generate_request("def", {"max_tokens": 50}, None, None)
    with pytest.raises(asyncio.CancelledError):
        await anext(service.Generate(request, cast("Any", Gone())))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(served.requests) == 0
