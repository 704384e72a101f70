"""The service behind Serve's gRPC proxy: statuses instead of exceptions, keys by an explicit check."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2  # type: ignore[import-untyped]
from harness.faces import TOKEN, gate

from coordinator.api.grpc.auth import KeyInterceptor
from coordinator.api.grpc.calls import GrpcCallObserver
from coordinator.auth import Gate, principal
from coordinator.telemetry.metrics import Metrics
from paceline.core.errors import InvalidArgumentError, PacelineError, UnavailableError
from paceline.ray.proxied import UNARY, ProxiedService
from paceline.rpc.codec.status import DETAILS_KEY, abort, from_status
from paceline.v1 import generation_pb2 as pb


@dataclass
class ServeContext:
    """Serve's context of a call, which travels back with each message."""

    metadata: list[tuple[str, str]] = field(default_factory=list)
    status: Any = None
    text: str = ""
    trailing: list[tuple[str, Any]] = field(default_factory=list)

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self.metadata

    def code(self) -> Any:
        return self.status

    def set_code(self, code: Any) -> None:
        self.status = code

    def set_details(self, text: str) -> None:
        self.text = text

    def set_trailing_metadata(self, trailing: list[tuple[str, Any]]) -> None:
        self.trailing = trailing

    @property
    def error(self) -> PacelineError:
        """What the client makes of it."""
        return from_status(status_pb2.Status.FromString(dict(self.trailing)[DETAILS_KEY]))


class Service:
    """Two methods of the service, which fail if told so."""

    def __init__(self, error: PacelineError | None = None) -> None:
        self.error = error
        self.callers: list[str] = []
        self.closed = False

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:  # noqa: N802
        self.callers.append(principal.get().name)
        if self.error is not None:
            await abort(context, self.error)
        return pb.TokenizeResponse(token_ids=[len(request.text)])

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.callers.append(principal.get().name)
        await context.send_initial_metadata(())
        assert context.time_remaining() is None
        try:
            yield pb.GenerateResponse(started=pb.GenerateStarted(request_id=request.request_id))
        except GeneratorExit:
            self.closed = True
            raise
        if self.error is not None:
            await abort(context, self.error)


def proxied(service: Service, its_gate: Gate | None = None) -> tuple[ProxiedService, Metrics]:
    metrics = Metrics()
    guards = [GrpcCallObserver(metrics), KeyInterceptor(its_gate or Gate())]
    return ProxiedService(service, guards), metrics  # type: ignore[arg-type]


async def all_of(service: ProxiedService, context: ServeContext) -> list[Any]:
    request = pb.GenerateRequest(request_id="mine")
    return [answer async for answer in service.streaming("Generate", request, context)]


def test_every_method_of_the_service_is_proxied() -> None:
    assert {*UNARY, "Generate"} == set(pb.DESCRIPTOR.services_by_name["GenerationService"].methods_by_name)


async def test_answers_pass() -> None:
    service, metrics = proxied(Service())
    context = ServeContext()
    answer = await service.unary("Tokenize", pb.TokenizeRequest(text="four"), context)
    assert list(answer.token_ids) == [4]
    (started,) = await all_of(service, context)
    assert started.started.request_id == "mine"
    assert context.status is None
    assert {method.rpartition("/")[2]: n for (method, _), n in metrics.grpc_calls.items()} == {
        "Tokenize": 1,
        "Generate": 1,
    }


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidArgumentError("text", "too long"), grpc.StatusCode.INVALID_ARGUMENT),
        (UnavailableError("stopping", 7), grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_an_error_is_a_status_after_an_empty_message(error: PacelineError, code: Any) -> None:
    """Serve sends a status along with messages only; an exception would lose its details."""
    service, metrics = proxied(Service(error))
    context = ServeContext()
    assert await service.unary("Tokenize", pb.TokenizeRequest(), context) == pb.TokenizeResponse()
    assert (context.status, type(context.error), str(context.error)) == (code, type(error), str(error))
    context = ServeContext()
    answers = await all_of(service, context)
    assert [answer.WhichOneof("part") for answer in answers] == ["started", None]
    assert (context.status, str(context.error)) == (code, str(error))
    if isinstance(error, UnavailableError):
        assert isinstance(context.error, UnavailableError)
        assert context.error.last_index == error.last_index
    assert {named for _, named in metrics.grpc_calls} == {code.name}


@pytest.mark.parametrize("authorization", [None, "Bearer wrong"])
async def test_a_call_without_a_key_is_refused(authorization: str | None) -> None:
    inner = Service()
    service, _ = proxied(inner, gate())
    metadata = [] if authorization is None else [("authorization", authorization)]
    context = ServeContext(metadata)
    assert await service.unary("Tokenize", pb.TokenizeRequest(), context) == pb.TokenizeResponse()
    assert context.status is grpc.StatusCode.UNAUTHENTICATED
    context = ServeContext(metadata)
    assert await all_of(service, context) == [pb.GenerateResponse()]
    assert context.status is grpc.StatusCode.UNAUTHENTICATED
    assert inner.callers == []


async def test_a_key_names_the_caller() -> None:
    inner = Service()
    service, _ = proxied(inner, gate())
    context = ServeContext([("authorization", f"Bearer {TOKEN}")])
    await service.unary("Tokenize", pb.TokenizeRequest(), context)
    await all_of(service, context)
    assert context.status is None
    assert len(set(inner.callers)) == 1
    assert inner.callers[0]


async def test_a_cancelled_stream_ends_its_handler_at_once() -> None:
    inner = Service()
    service, _ = proxied(inner)
    answers = service.streaming("Generate", pb.GenerateRequest(), ServeContext())
    await anext(answers)
    await answers.aclose()
    assert inner.closed
