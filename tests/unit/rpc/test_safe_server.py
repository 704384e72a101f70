"""gRPC's accept loop: no method name ends it, and a process whose loop ended exits."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc

from paceline.core.errors import InternalError
from paceline.rpc.server import server as module
from paceline.rpc.server.safe_server import KNOWN_VERSIONS, UNKNOWN_METHOD, takes_calls
from tests.unit.rpc.raw_http2 import calling, read_until
from tests.unit.rpc.serving import NOT_SERVING, SERVING, health, serving

NO_TEXT = b"/paceline.v1.GenerationService/\xff\xfe"
UNIMPLEMENTED = b"grpc-status\x0212"


class Watched(grpc.aio.ServerInterceptor):
    """Keeps the names that it is told."""

    def __init__(self) -> None:
        self.methods: list[str] = []

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        self.methods.append(handler_call_details.method)
        return await continuation(handler_call_details)


@pytest.mark.parametrize("path", [NO_TEXT, b"/\x80", b"\xc3\x28/x", b"/grpc.health.v1.Health/\xff", b"/a/b"])
async def test_an_undecodable_method_name_is_unimplemented(path: bytes) -> None:
    """It must not end gRPC's accept loop."""
    watched = Watched()
    async with serving("target", interceptors=[watched]) as server:
        for _ in range(3):
            async with calling(server.address, path) as reader:
                assert UNIMPLEMENTED in await read_until(reader, UNIMPLEMENTED)
        assert watched.methods == [UNKNOWN_METHOD] * 3
        assert takes_calls(server.grpc)
        async with health(server) as client:
            assert await client.check() == NOT_SERVING
    assert not takes_calls(server.grpc)


def test_the_tested_grpc_version_is_known() -> None:
    assert grpc.__version__.startswith(KNOWN_VERSIONS), "look at accepting.py with this version's sources"


async def test_an_unknown_grpc_version_is_left_unpatched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grpc, "__version__", "1.86.0")
    async with serving("target") as server, health(server) as client:
        assert type(server.grpc._server) is cygrpc.AioServer
        assert "grpcio 1.86.0 may stop accepting calls" in caplog.text
        assert await client.check() == NOT_SERVING


async def test_a_running_call_survives_an_undecodable_name() -> None:
    async with serving("target") as server, health(server) as client:
        watch = client.watch()
        assert (await watch.read()).status == NOT_SERVING
        async with calling(server.address, NO_TEXT) as reader:
            assert UNIMPLEMENTED in await read_until(reader, UNIMPLEMENTED)
        await server.set_serving(True)
        assert (await watch.read()).status == SERVING
        watch.cancel()


async def drained() -> None:
    """Nothing runs."""


async def test_a_process_that_accepts_no_calls_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here by what ends gRPC's own loop."""
    monkeypatch.setattr(module, "HEARING_SECONDS", 0.01)
    plain = lambda interceptors, options: grpc.aio.server(None, None, interceptors, options)  # noqa: E731
    monkeypatch.setattr(module, "make_server", plain)
    async with serving("target") as server:
        running = asyncio.create_task(server.run_until_stopped(drain=drained))
        async with calling(server.address, NO_TEXT):
            with pytest.raises(InternalError, match="gRPC no longer accepts calls"):
                await running
        assert server.abandoned


async def test_a_stopping_server_is_not_reported_as_broken() -> None:
    async with serving("target") as server:
        running = asyncio.create_task(server.run_until_stopped(drain=drained))
        server.request_stop()
        await running
        assert not server.abandoned
