"""Health checks: statuses, and watchers that do not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.core.limits import MAX_HEALTH_SERVICE_CHARACTERS
from paceline.rpc.server.server import Server
from tests.unit.rpc.raw_http2 import NO_WINDOW, calling, read_until

HANG = 20.0
STATUS = health_pb2.HealthCheckResponse
MINE = "test.Mine"


@dataclass
class Served:
    """A server, and a client of its health."""

    server: Server
    stub: Any

    async def check(self, name: str = "") -> int:
        return int((await self.stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=HANG)).status)

    def watch(self, name: str = "") -> Any:
        return self.stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=HANG)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    server = Server("target", "127.0.0.1", 0)
    await server.start()
    async with asyncio.timeout(HANG), grpc.aio.insecure_channel(server.address) as channel:
        yield Served(server, health_pb2_grpc.HealthStub(channel))
    await server.grpc.stop(None)


async def test_readiness_is_reported_as_set(served: Served) -> None:
    assert await served.check() == STATUS.NOT_SERVING
    await served.server.set_serving(True, [MINE])
    assert [await served.check(name) for name in ("", MINE)] == [STATUS.SERVING] * 2
    await served.server.set_serving(False, [MINE])
    assert [await served.check(name) for name in ("", MINE)] == [STATUS.NOT_SERVING] * 2


async def test_an_unknown_service_is_not_found(served: Served) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.check("nobody.Knows")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_all_known_services_are_listed(served: Served) -> None:
    await served.server.set_serving(True, [MINE])
    await served.server.set_serving(False)
    answer = await served.stub.List(health_pb2.HealthListRequest(), timeout=HANG)
    told = {name: state.status for name, state in answer.statuses.items()}
    assert told == {"": STATUS.NOT_SERVING, MINE: STATUS.SERVING}


async def test_a_watcher_gets_each_change_once(served: Served) -> None:
    watch = served.watch(MINE)
    assert (await watch.read()).status == STATUS.SERVICE_UNKNOWN
    for serving, told in ((True, STATUS.SERVING), (False, STATUS.NOT_SERVING), (True, STATUS.SERVING)):
        # Another service's changes, and the same state again, are no news.
        await served.server.set_serving(not serving)
        await served.server.set_serving(serving, [MINE])
        await served.server.set_serving(serving, [MINE])
        assert (await watch.read()).status == told
    watch.cancel()


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_a_service_name_is_bounded(method: str, served: Served) -> None:
    async def ask(length: int) -> Any:
        request = health_pb2.HealthCheckRequest(service="я" * length)
        if method == "Check":
            return await served.stub.Check(request, timeout=HANG)
        return await served.stub.Watch(request, timeout=HANG).read()

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(MAX_HEALTH_SERVICE_CHARACTERS + 1)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == f"service: at most {MAX_HEALTH_SERVICE_CHARACTERS} characters"
    if method == "Watch":
        assert (await ask(MAX_HEALTH_SERVICE_CHARACTERS)).status == STATUS.SERVICE_UNKNOWN


async def test_a_watcher_that_does_not_read_delays_nobody(served: Served) -> None:
    """Health changes and SIGTERM still take effect."""
    server = served.server
    await server.set_serving(True)
    path = b"/grpc.health.v1.Health/Watch"
    async with calling(server.address, path, message=b"", settings=NO_WINDOW) as reader:
        # Its answer has begun: what is to follow waits for room.
        assert await read_until(reader, b"application/grpc")
        other = served.watch()
        assert (await other.read()).status == STATUS.SERVING
        await server.set_serving(False)
        assert (await other.read()).status == STATUS.NOT_SERVING
        other.cancel()

        async def drain() -> None:
            pass

        serving = asyncio.create_task(server.run_until_stopped(exit_with_parent=False, drain=drain))
        server.request_stop()
        await serving


async def test_a_stopped_server_stays_not_serving(served: Served) -> None:
    await served.server.set_serving(True, [MINE])
    watch = served.watch(MINE)
    assert (await watch.read()).status == STATUS.SERVING
    served.server._health.stop()
    assert (await watch.read()).status == STATUS.NOT_SERVING
    await served.server.set_serving(True, [MINE, "test.Other"])
    assert [await served.check(name) for name in ("", MINE)] == [STATUS.NOT_SERVING] * 2
    with pytest.raises(grpc.aio.AioRpcError):
        await served.check("test.Other")
    assert await watch.read() is grpc.aio.EOF, "nobody is kept waiting for what cannot come"
    assert [answer.status async for answer in served.watch(MINE)] == [STATUS.NOT_SERVING]
