"""The client port: number and age of connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.client import channel as sdk
from paceline.core import limits
from paceline.core.system import descriptors
from paceline.rpc.server.ports import PortBounds, client_port
from paceline.rpc.server.server import Server
from tests.unit.rpc.raw_http2 import Connection, connect

HANG = 30.0
LONG = 1000.0


@contextlib.asynccontextmanager
async def serving(**changes: Any) -> AsyncIterator[Server]:
    bounds = replace(client_port(100, LONG), **changes)
    server = Server("coordinator", "127.0.0.1", 0, bounds=bounds)
    await server.start()
    try:
        async with asyncio.timeout(HANG):
            yield server
    finally:
        await server.grpc.stop(None)


async def outlasted(server: Server) -> None:
    """A connection without a call was closed meanwhile."""
    silent = await connect(server.address)
    await silent.closed()
    await silent.close()


async def check(channel: grpc.aio.Channel) -> None:
    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=HANG)


def test_no_request_outlasts_its_connection() -> None:
    options = client_port(1, limits.MAX_REQUEST_SECONDS).options
    assert options["grpc.max_connection_age_grace_ms"] >= limits.MAX_REQUEST_SECONDS * 1000


def test_worker_connections_have_no_age_limit() -> None:
    assert not {name for name in PortBounds().options if "_age_" in name}


@contextlib.asynccontextmanager
async def client(server: Server, options: Sequence[tuple[str, int]]) -> AsyncIterator[grpc.aio.Channel]:
    own = [*options, ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(server.address, options=own) as channel:
        yield channel


async def test_an_idle_connection_ends_without_an_error() -> None:
    """Clients print each error that ends a connection."""
    async with serving(age_seconds=0.2) as server:
        silent = await connect(server.address)
        await silent.closed()
        assert silent.farewells
        assert set(silent.farewells) == {0}
        await silent.close()


async def test_a_connections_age_loses_no_call() -> None:
    async with serving(age_seconds=0.2) as server, client(server, sdk.CHANNEL_OPTIONS) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        over = asyncio.create_task(outlasted(server))
        checks = 0
        while not over.done() or checks < 100:
            await check(channel)
            checks += 1
        await over
        # The stream that began on the first connection goes on.
        await server.set_serving(True)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


async def test_a_connection_over_the_bound_is_closed() -> None:
    async with serving(connections=2) as server:
        held = [await connect(server.address) for _ in range(2)]
        for each in held:
            await answered(each)
        more = await connect(server.address)
        await more.closed()
        await held.pop().close()
        while True:  # until the server has seen that the other one is gone
            again = await connect(server.address)
            if await answered(again):
                break
            await again.close()
        await asyncio.gather(*(each.close() for each in (again, more, *held)))


async def answered(connection: Connection) -> bool:
    """Whether a call of it is."""
    try:
        return bool(await connection.end_of(connection.begin(b"/a/b")))
    except ConnectionError:
        return False


def test_some_descriptors_are_kept_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "_limit", lambda: 128)
    monkeypatch.setattr(descriptors, "_open_now", lambda: 20)
    assert descriptors.connections(2) == (128 - 20 - descriptors.KEPT_FREE) // 2
    monkeypatch.setattr(descriptors, "_open_now", lambda: 100)
    assert descriptors.connections(2) == 1


def test_the_descriptor_limit_is_raised() -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        descriptors.raise_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
