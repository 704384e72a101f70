"""The client port: number and age of connections, and of their concurrent calls."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import pytest

from paceline.client import channel as sdk
from paceline.core import limits
from paceline.core.system import descriptors
from paceline.rpc.server.ports import PortBounds, client_port
from paceline.rpc.server.server import Server
from tests.unit.rpc.raw_http2 import Connection, connect
from tests.unit.rpc.serving import NOT_SERVING, SERVING, Health, health, serving

LONG = 1000.0


def bounded(**changes: Any) -> AbstractAsyncContextManager[Server]:
    """A client port with other bounds."""
    return serving(bounds=replace(client_port(100, LONG), **changes))


async def outlasted(server: Server) -> None:
    """A connection without a call was closed meanwhile."""
    silent = await connect(server.address)
    await silent.closed()
    await silent.close()


def test_no_request_outlasts_its_connection() -> None:
    options = client_port(1, limits.MAX_REQUEST_SECONDS).options
    assert options["grpc.max_connection_age_grace_ms"] >= limits.MAX_REQUEST_SECONDS * 1000


def test_worker_connections_have_no_age_limit() -> None:
    assert not {name for name in PortBounds().options if "_age_" in name}


async def test_an_idle_connection_ends_without_an_error() -> None:
    """Clients print each error that ends a connection."""
    async with bounded(age_seconds=0.2) as server:
        silent = await connect(server.address)
        await silent.closed()
        assert silent.farewells
        assert set(silent.farewells) == {0}
        await silent.close()


async def test_a_connections_age_loses_no_call() -> None:
    async with bounded(age_seconds=0.2) as server, health(server, sdk.CHANNEL_OPTIONS) as client:
        watch = client.watch()
        await watch.read()
        over = asyncio.create_task(outlasted(server))
        checks = 0
        while not over.done() or checks < 100:
            assert await client.check() == NOT_SERVING
            checks += 1
        await over
        # The stream that began on the first connection goes on.
        await server.set_serving(True)
        assert (await watch.read()).status == SERVING
        watch.cancel()


async def test_a_call_over_the_bound_waits_at_the_client() -> None:
    most, option = 2, "grpc.max_concurrent_streams"
    assert client_port(1, 1.0).options[option] == limits.MAX_CALLS_PER_CLIENT_CONNECTION
    began: asyncio.Queue[int] = asyncio.Queue()

    async def watch(client: Health, number: int) -> None:
        async for _ in client.watch():
            began.put_nowait(number)

    # The same, with a bound that a test can reach.
    async with bounded(calls=most) as server, health(server) as client:
        # The bound itself comes with the connection's first bytes.
        await client.check()
        calls = [asyncio.create_task(watch(client, number)) for number in range(most)]
        assert {await began.get() for _ in range(most)} == set(range(most))
        calls.append(asyncio.create_task(watch(client, most)))
        # Another client is served meanwhile, and this one is told nothing.
        async with health(server) as other:
            for _ in range(20):
                await other.check()
        assert began.empty()
        calls[0].cancel()
        assert await began.get() == most
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_a_connection_over_the_bound_is_closed() -> None:
    async with bounded(connections=2) as server:
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
