"""The HTTP port over real connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from coordinator.api.http.server.server import BoundedProtocol, HttpServer
from tests.unit.http.api import HANG


@contextlib.asynccontextmanager
async def served(app: Any, **options: Any) -> AsyncIterator[HttpServer]:
    server = HttpServer(app, "127.0.0.1", 0, **options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(1)


@contextlib.asynccontextmanager
async def connected(server: HttpServer) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = server.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(HANG):
            yield reader, writer
    finally:
        writer.close()


async def exchange(server: HttpServer, *pieces: bytes) -> bytes:
    """What comes back until the server closes the connection."""
    async with connected(server) as (reader, writer):
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            return await reader.read()
    return b""


def connections(server: HttpServer) -> set[Any]:
    """The server's ends of the open connections."""
    return server._uvicorn.server_state.connections


async def server_end(server: HttpServer) -> BoundedProtocol:
    """That of the only connection."""
    while not connections(server):  # noqa: ASYNC110
        await asyncio.sleep(0)
    (protocol,) = connections(server)
    assert isinstance(protocol, BoundedProtocol)
    return protocol


def post(path: str, body: bytes, more: bytes = b"") -> bytes:
    """A request with a body; `more` are further lines of its head."""
    head = b"POST %s HTTP/1.1\r\nhost: x\r\n%scontent-length: %d\r\n\r\n"
    return head % (path.encode(), more, len(body)) + body


async def start_answer(send: Any, status: int = 200, length: int | None = None) -> None:
    headers = [] if length is None else [(b"content-length", b"%d" % length)]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def send_body(send: Any, body: bytes, *, more: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
