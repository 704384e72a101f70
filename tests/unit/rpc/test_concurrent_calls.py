"""The bound on concurrent calls of a gRPC connection."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.core import limits
from paceline.rpc.server.ports import client_port
from paceline.rpc.server.server import Server

HANG = 30.0
MOST = 2
OPTION = "grpc.max_concurrent_streams"


async def test_a_call_over_the_bound_waits_at_the_client() -> None:
    assert client_port(1, 1.0).options[OPTION] == limits.MAX_CALLS_PER_CLIENT_CONNECTION
    # The same, with a bound that a test can reach.
    server = Server("coordinator", "127.0.0.1", 0, bounds=replace(client_port(10, 60.0), calls=MOST))
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
