"""Workers with a secret: every method but health requires it, and a coordinator's link sends it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from coordinator.workers.links import Link, LinkObserver, LinkState
from coordinator.workers.stream_protocol import DRAFT, TARGET, StreamProtocol
from paceline.core.security.secret import WorkerSecret, new_secret
from paceline.rpc.server.server import Server
from paceline.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from tests.unit.rpc.serving import HANG, SERVING, Health, serving

SECRET = WorkerSecret(new_secret())
OTHER = WorkerSecret(new_secret())


def prepare(role: str) -> Callable[[Server], None]:
    """A worker that says what it is, and answers each message of its stream."""
    target = role == "target"
    info = common_pb2.WorkerInfo(role=role)
    of_info = (
        target_pb2.TargetServiceGetWorkerInfoResponse
        if target
        else draft_pb2.DraftServiceGetWorkerInfoResponse
    )
    of_stream = target_pb2.VerifyResponse if target else draft_pb2.DraftResponse

    class Worker:
        async def GetWorkerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
            return of_info(info=info)

        async def Verify(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
            async for _ in request_iterator:
                yield of_stream()

        Draft = Verify

    def add(server: Server) -> None:
        if target:
            target_pb2_grpc.add_TargetServiceServicer_to_server(Worker(), server.grpc)
        else:
            draft_pb2_grpc.add_DraftServiceServicer_to_server(Worker(), server.grpc)
        server.reflect(f"paceline.v1.{role.capitalize()}Service")

    return add


@contextlib.asynccontextmanager
async def worker(role: str) -> AsyncIterator[Server]:
    """With the secret."""
    async with serving(role, prepare=prepare(role), secret=SECRET) as server:
        await server.set_serving(True)
        yield server


def methods(role: str) -> list[str]:
    package = target_pb2 if role == "target" else draft_pb2
    (service,) = package.DESCRIPTOR.services_by_name.values()
    of_service = [f"/{service.full_name}/{method.name}" for method in service.methods]
    reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    return [*of_service, reflection, f"/{service.full_name}/Unknown", "/nobody.Knows/This"]


async def code(channel: grpc.aio.Channel, method: str, metadata: Any) -> grpc.StatusCode:
    call = channel.stream_stream(method)(iter([b""]), metadata=metadata, timeout=HANG)
    async for _ in call:
        pass
    return await call.code()


async def refusal_of(channel: grpc.aio.Channel, method: str, metadata: Any) -> grpc.aio.AioRpcError:
    """The server's refusal of a call, asked for again where the message met a call that was over already.

    gRPC's client then reports an error of its own in place of the server's status.
    """
    while True:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await code(channel, method, metadata)
        if refusal.value.details() != "Internal error from Core":
            return refusal.value


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("shown", [(), OTHER.metadata], ids=["none", "another"])
async def test_every_method_but_health_requires_the_secret(role: str, shown: Any) -> None:
    async with worker(role) as server, grpc.aio.insecure_channel(server.address) as channel:
        for method in methods(role):
            refusal = await refusal_of(channel, method, shown)
            assert refusal.code() is grpc.StatusCode.UNAUTHENTICATED, method
            assert SECRET.text not in str(refusal)
        assert await Health(channel).check() == SERVING


@contextlib.asynccontextmanager
async def linked(
    protocol: StreamProtocol, secret: WorkerSecret | None
) -> AsyncIterator[tuple[Link, asyncio.Event]]:
    """A link that runs, and what is set when it is ready."""
    ready = asyncio.Event()

    def nothing(*_: Any) -> None:
        pass

    observer = LinkObserver(nothing, lambda _: ready.set(), nothing, nothing)
    async with worker(protocol.role) as server:
        link = Link(server.address, protocol, observer, secret=secret)
        running = asyncio.create_task(link.run())
        yield link, ready
        running.cancel()


@pytest.mark.parametrize("protocol", [TARGET, DRAFT], ids=["target", "draft"])
async def test_a_link_with_the_secret_becomes_ready(protocol: StreamProtocol) -> None:
    async with linked(protocol, SECRET) as (link, ready):
        await ready.wait()
        assert link.state is LinkState.READY
        assert await link.refresh() is not None


@pytest.mark.parametrize("secret", [None, OTHER], ids=["none", "another"])
async def test_a_link_without_the_secret_is_told_why(
    secret: WorkerSecret | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with linked(TARGET, secret) as (link, _):
        await link.settled.wait()
        assert link.state is LinkState.REFUSED
        assert "secret" in link.reason
        assert "is refused: the worker secret" in caplog.text
