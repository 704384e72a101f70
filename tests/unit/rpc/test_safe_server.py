"""gRPC's accept loop: no method name ends it, and a process whose loop ended exits."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.core.errors import InternalError
from paceline.rpc.server import server as module
from paceline.rpc.server.safe_server import KNOWN_VERSIONS, UNKNOWN_METHOD, takes_calls
from paceline.rpc.server.server import Server
from tests.unit.rpc.raw_http2 import calling, read_until

HANG = 20.0
NO_TEXT = b"/paceline.v1.GenerationService/\xff\xfe"
UNIMPLEMENTED = b"grpc-status\x0212"


class Watched(grpc.aio.ServerInterceptor):
    """Keeps the names that it is told."""

    def __init__(self) -> None:
        self.methods: list[str] = []

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        self.methods.append(handler_call_details.method)
        return await continuation(handler_call_details)


async def is_answered(address: str) -> bool:
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=HANG
        )
    return bool(answer.status == health_pb2.HealthCheckResponse.NOT_SERVING)


@pytest.mark.parametrize("path", [NO_TEXT, b"/\x80", b"\xc3\x28/x", b"/grpc.health.v1.Health/\xff", b"/a/b"])
async def test_an_undecodable_method_name_is_unimplemented(path: bytes) -> None:
    """It must not end gRPC's accept loop."""
    watched = Watched()
    server = Server("target", "127.0.0.1", 0, interceptors=[watched])
    await server.start()
    try:
        async with asyncio.timeout(HANG):
            for _ in range(3):
                async with calling(server.address, path) as reader:
                    assert UNIMPLEMENTED in await read_until(reader, UNIMPLEMENTED)
            assert watched.methods == [UNKNOWN_METHOD] * 3
            assert takes_calls(server.grpc)
            assert await is_answered(server.address)
    finally:
        await server.grpc.stop(None)
    assert not takes_calls(server.grpc)


def test_the_tested_grpc_version_is_known() -> None:
    assert grpc.__version__.startswith(KNOWN_VERSIONS), "look at accepting.py with this version's sources"


async def test_an_unknown_grpc_version_is_left_unpatched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grpc, "__version__", "1.86.0")
    server = Server("target", "127.0.0.1", 0)
    assert type(server.grpc._server) is cygrpc.AioServer  # type: ignore[attr-defined]
    assert "grpcio 1.86.0 may stop accepting calls" in caplog.text
    await server.start()
    assert await is_answered(server.address)
    await server.grpc.stop(None)


async def test_a_running_call_survives_an_undecodable_name() -> None:
    server = Server("target", "127.0.0.1", 0)
    await server.start()
    async with asyncio.timeout(HANG), grpc.aio.insecure_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        async with calling(server.address, NO_TEXT) as reader:
            assert UNIMPLEMENTED in await read_until(reader, UNIMPLEMENTED)
        await server.set_serving(True)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
    await server.grpc.stop(None)


async def drained() -> None:
    """Nothing runs."""


async def test_a_process_that_accepts_no_calls_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here by what ends gRPC's own loop."""
    monkeypatch.setattr(module, "HEARING_SECONDS", 0.01)
    monkeypatch.setattr(
        module,
        "make_server",
        lambda interceptors, options: grpc.aio.server(None, None, interceptors, options),
    )
    server = Server("target", "127.0.0.1", 0)
    await server.start()
    serving = asyncio.create_task(server.run_until_stopped(exit_with_parent=False, drain=drained))
    async with asyncio.timeout(HANG):
        async with calling(server.address, NO_TEXT):
            with pytest.raises(InternalError, match="gRPC no longer accepts calls"):
                await serving
    assert server.abandoned


async def test_a_stopping_server_is_not_reported_as_broken() -> None:
    server = Server("target", "127.0.0.1", 0)
    await server.start()
    serving = asyncio.create_task(server.run_until_stopped(exit_with_parent=False, drain=drained))
    server.request_stop()
    async with asyncio.timeout(HANG):
        await serving
    assert not server.abandoned
