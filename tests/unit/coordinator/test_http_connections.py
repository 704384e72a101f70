"""The bound on connections of the HTTP port."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from coordinator.api.http.server.server import HttpServer

HANG = 30.0
MOST = 2
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


async def ok(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def test_a_connection_over_the_bound_is_closed() -> None:
    """Open connections go on; idle ones count."""
    server = HttpServer(ok, "127.0.0.1", 0, max_connections=MOST)
    await server.start()
    connections = server._uvicorn.server_state.connections

    async def open_connection() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = server.address.split(":")
        return await asyncio.open_connection(host, int(port))

    async def counted(number: int) -> None:
        while len(connections) != number:  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0)

    async def answer() -> bytes:
        reader, writer = await open_connection()
        with contextlib.closing(writer):
            writer.write(REQUEST)
            return await reader.read()

    try:
        async with asyncio.timeout(HANG):
            assert (await answer()).startswith(b"HTTP/1.1 200 ")
            await counted(0)
            reader, writer = await open_connection()
            silent = [(await open_connection())[1] for _ in range(MOST - 1)]
            await counted(MOST)
            assert (await answer()).startswith(b"HTTP/1.1 503 ")
            writer.write(REQUEST)
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            for each in (writer, *silent):
                each.close()
            await counted(0)
            assert (await answer()).startswith(b"HTTP/1.1 200 ")
    finally:
        await server.stop(1)
