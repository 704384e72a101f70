"""Workers with a secret: every method but health requires it, and a coordinator's link sends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.workers.links import Link, LinkObserver, LinkState
from coordinator.workers.stream_protocol import DRAFT, TARGET, StreamProtocol
from paceline.core.security.secret import WorkerSecret, new_secret
from paceline.rpc.server.server import Server
from paceline.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

HANG = 60.0
SECRET = WorkerSecret(new_secret())
OTHER = WorkerSecret(new_secret())


class Target(target_pb2_grpc.TargetServiceServicer):
    async def GetWorkerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        return target_pb2.TargetServiceGetWorkerInfoResponse(info=common_pb2.WorkerInfo(role="target"))

    async def Verify(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for _ in request_iterator:
            yield target_pb2.VerifyResponse()


class Draft(draft_pb2_grpc.DraftServiceServicer):
    async def GetWorkerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        return draft_pb2.DraftServiceGetWorkerInfoResponse(info=common_pb2.WorkerInfo(role="draft"))

    async def Draft(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for _ in request_iterator:
            yield draft_pb2.DraftResponse()


async def worker(role: str, secret: WorkerSecret | None) -> Server:
    server = Server(role, "127.0.0.1", 0, secret=secret)
    if role == "target":
        target_pb2_grpc.add_TargetServiceServicer_to_server(Target(), server.grpc)
    else:
        draft_pb2_grpc.add_DraftServiceServicer_to_server(Draft(), server.grpc)
    server.reflect(f"paceline.v1.{role.capitalize()}Service")
    await server.start()
    await server.set_serving(True)
    return server


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
    server = await worker(role, SECRET)
    async with grpc.aio.insecure_channel(server.address) as channel:
        for method in methods(role):
            refusal = await refusal_of(channel, method, shown)
            assert refusal.code() is grpc.StatusCode.UNAUTHENTICATED, method
            assert SECRET.text not in str(refusal)
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    await server.grpc.stop(None)


def link_to(
    address: str, protocol: StreamProtocol, secret: WorkerSecret | None
) -> tuple[Link, asyncio.Event]:
    ready = asyncio.Event()

    def nothing(*_: Any) -> None:
        pass

    observer = LinkObserver(nothing, lambda _: ready.set(), nothing, nothing)
    return Link(address, protocol, observer, secret=secret), ready


@pytest.mark.parametrize("protocol", [TARGET, DRAFT], ids=["target", "draft"])
async def test_a_link_with_the_secret_becomes_ready(protocol: StreamProtocol) -> None:
    server = await worker(protocol.role, SECRET)
    link, ready = link_to(server.address, protocol, SECRET)
    running = asyncio.create_task(link.run())
    async with asyncio.timeout(HANG):
        await ready.wait()
    assert link.state is LinkState.READY
    assert await link.refresh() is not None
    running.cancel()
    await server.grpc.stop(None)


@pytest.mark.parametrize("secret", [None, OTHER], ids=["none", "another"])
async def test_a_link_without_the_secret_is_told_why(
    secret: WorkerSecret | None, caplog: pytest.LogCaptureFixture
) -> None:
    server = await worker("target", SECRET)
    link, _ = link_to(server.address, TARGET, secret)
    running = asyncio.create_task(link.run())
    async with asyncio.timeout(HANG):
        await link.settled.wait()
    assert link.state is LinkState.REFUSED
    assert "secret" in link.reason
    assert "is refused: the worker secret" in caplog.text
    running.cancel()
    await server.grpc.stop(None)
