"""A gRPC server of this process, and clients of its health."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.rpc.server.server import Server

HANG = 30.0
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@contextlib.asynccontextmanager
async def serving(
    role: str = "coordinator",
    host: str = "127.0.0.1",
    *,
    prepare: Callable[[Server], None] | None = None,
    **options: Any,
) -> AsyncIterator[Server]:
    """`prepare` adds services before the start."""
    server = Server(role, host, 0, **options)
    if prepare is not None:
        prepare(server)
    await server.start()
    try:
        async with asyncio.timeout(HANG):
            yield server
    finally:
        await server.grpc.stop(None)


class Health:
    """A client of a server's health."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub: Any = health_pb2_grpc.HealthStub(channel)

    async def check(self, name: str = "") -> int:
        request = health_pb2.HealthCheckRequest(service=name)
        return int((await self.stub.Check(request, timeout=HANG)).status)

    def watch(self, name: str = "") -> Any:
        return self.stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=HANG)


@contextlib.asynccontextmanager
async def health(server: Server, options: Sequence[tuple[str, int]] = ()) -> AsyncIterator[Health]:
    """Over a connection of its own."""
    own = [*options, ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(server.address, options=own) as channel:
        yield Health(channel)
