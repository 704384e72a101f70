"""Health checks: statuses, and watchers that do not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from paceline.core.limits import MAX_HEALTH_SERVICE_CHARACTERS
from paceline.rpc.server.server import Server
from tests.unit.rpc.raw_http2 import NO_WINDOW, calling, read_until
from tests.unit.rpc.serving import HANG, Health, health, serving

STATUS = health_pb2.HealthCheckResponse
MINE = "test.Mine"


@dataclass
class Served:
    """A server, and a client of its health."""

    server: Server
    health: Health

    async def checks(self) -> list[int]:
        """What is said of the server, and of one of its services."""
        return [await self.health.check(name) for name in ("", MINE)]


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving("target") as server, health(server) as client:
        yield Served(server, client)


async def test_readiness_is_reported_as_set(served: Served) -> None:
    assert await served.health.check() == STATUS.NOT_SERVING
    await served.server.set_serving(True, [MINE])
    assert await served.checks() == [STATUS.SERVING] * 2
    await served.server.set_serving(False, [MINE])
    assert await served.checks() == [STATUS.NOT_SERVING] * 2


async def test_an_unknown_service_is_not_found(served: Served) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.health.check("nobody.Knows")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_all_known_services_are_listed(served: Served) -> None:
    await served.server.set_serving(True, [MINE])
    await served.server.set_serving(False)
    answer = await served.health.stub.List(health_pb2.HealthListRequest(), timeout=HANG)
    told = {name: state.status for name, state in answer.statuses.items()}
    assert told == {"": STATUS.NOT_SERVING, MINE: STATUS.SERVING}


async def test_a_watcher_gets_each_change_once(served: Served) -> None:
    watch = served.health.watch(MINE)
    assert (await watch.read()).status == STATUS.SERVICE_UNKNOWN
    for ready, told in ((True, STATUS.SERVING), (False, STATUS.NOT_SERVING), (True, STATUS.SERVING)):
        # Another service's changes, and the same state again, are no news.
        await served.server.set_serving(not ready)
        await served.server.set_serving(ready, [MINE])
        await served.server.set_serving(ready, [MINE])
        assert (await watch.read()).status == told
    watch.cancel()


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_a_service_name_is_bounded(method: str, served: Served) -> None:
    async def ask(length: int) -> Any:
        if method == "Check":
            return await served.health.check("я" * length)
        return await served.health.watch("я" * length).read()

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
        other = served.health.watch()
        assert (await other.read()).status == STATUS.SERVING
        await server.set_serving(False)
        assert (await other.read()).status == STATUS.NOT_SERVING
        other.cancel()

        async def drain() -> None:
            pass

        serving = asyncio.create_task(server.run_until_stopped(drain=drain))
        server.request_stop()
        await serving


async def test_a_stopped_server_stays_not_serving(served: Served) -> None:
    await served.server.set_serving(True, [MINE])
    watch = served.health.watch(MINE)
    assert (await watch.read()).status == STATUS.SERVING
    served.server._health.stop()
    assert (await watch.read()).status == STATUS.NOT_SERVING
    await served.server.set_serving(True, [MINE, "test.Other"])
    assert await served.checks() == [STATUS.NOT_SERVING] * 2
    with pytest.raises(grpc.aio.AioRpcError):
        await served.health.check("test.Other")
    assert await watch.read() is grpc.aio.EOF, "nobody is kept waiting for what cannot come"
    assert [answer.status async for answer in served.health.watch(MINE)] == [STATUS.NOT_SERVING]
