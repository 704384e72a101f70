"""How many calls one gRPC connection carries at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.core import limits
from paceline.rpc import server as module
from paceline.rpc.server import Server

HANG = 30.0
MOST = 2
OPTION = "grpc.max_concurrent_streams"


async def test_one_call_more_than_the_bound_waits_at_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    options = dict(module.SERVER_OPTIONS)
    assert options[OPTION] == limits.MAX_CALLS_PER_CONNECTION
    # The same server, with a bound that a test can reach.
    few = {name: MOST if name == OPTION else value for name, value in options.items()}
    monkeypatch.setattr(module, "SERVER_OPTIONS", tuple(few.items()))
    server = Server("coordinator", "127.0.0.1", 0)
    await server.start()
    began: asyncio.Queue[int] = asyncio.Queue()

    async def watch(stub: Any, number: int) -> None:
        async for _ in stub.Watch(health_pb2.HealthCheckRequest(), timeout=HANG):
            began.put_nowait(number)

    async with grpc.aio.insecure_channel(server.address) as channel, asyncio.timeout(HANG):
        stub = health_pb2_grpc.HealthStub(channel)
        # The bound itself comes with the connection's first bytes.
        await stub.Check(health_pb2.HealthCheckRequest())
        calls = [asyncio.create_task(watch(stub, number)) for number in range(MOST)]
        assert {await began.get() for _ in range(MOST)} == set(range(MOST))
        calls.append(asyncio.create_task(watch(stub, MOST)))
        # Another client is served meanwhile, and this one is told nothing.
        options_of_its_own = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(server.address, options=options_of_its_own) as other:
            for _ in range(20):
                await health_pb2_grpc.HealthStub(other).Check(health_pb2.HealthCheckRequest())
        assert began.empty()
        calls[0].cancel()
        assert await began.get() == MOST
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    await server.grpc.stop(None)
