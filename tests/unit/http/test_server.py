"""The port: its bounds on what a client may send, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from coordinator.http import body
from coordinator.http import server as module
from coordinator.http.app import make_app
from coordinator.http.server import HttpServer
from paceline.core import limits
from paceline.core.errors import UnavailableError

HANG = 30.0


@contextlib.asynccontextmanager
async def served(app: Any) -> AsyncIterator[HttpServer]:
    server = HttpServer(app, "127.0.0.1", 0)
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


CLOSE = b"host: x\r\nconnection: close\r\n\r\n"


async def test_a_request_over_a_real_connection(coordinator: Any) -> None:
    async with served(make_app(coordinator, None)) as server:
        answer = await exchange(server, b"GET /version HTTP/1.1\r\n" + CLOSE)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"server:" not in answer.lower()


async def test_a_head_that_never_ends_is_refused(coordinator: Any) -> None:
    line = b"GET /version HTTP/1.1\r\n"
    fitting = b"x-a: %s\r\n" % (b"y" * (limits.MAX_HTTP_HEAD_BYTES - 200))
    async with served(make_app(coordinator, None)) as server:
        answer = await exchange(server, line + fitting, b"x-b: %s\r\n" % (b"z" * 200))
        assert answer.startswith(b"HTTP/1.1 431 ")
        good = await exchange(server, line + fitting, CLOSE)
        assert good.startswith(b"HTTP/1.1 200 ")


async def test_bytes_of_a_body_are_not_those_of_a_head(coordinator: Any) -> None:
    prompt = b'{"prompt": "%s", "max_tokens": 1}' % (b"x" * 2 * limits.MAX_HTTP_HEAD_BYTES)
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(prompt)
    async with served(make_app(coordinator, None)) as server:
        answer = await exchange(server, head + prompt, b"GET /version HTTP/1.1\r\n" + CLOSE)
    assert b"max_tokens" in answer  # unknown to /tokenize, so the body was read
    assert answer.count(b"HTTP/1.1 200 ") == 1


@pytest.mark.parametrize("begun", [b"", b"GET /version HTTP/1.1\r\nhost:"])
async def test_a_client_that_does_not_finish_its_head_is_let_go(
    begun: bytes, coordinator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEAD_SECONDS", 0.05)
    async with served(make_app(coordinator, None)) as server:
        assert await exchange(server, begun) == b""


async def test_a_client_that_does_not_finish_its_body_is_told(
    coordinator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "BODY_SECONDS", 0.05)
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
    async with served(make_app(coordinator, None)) as server:
        answer = await exchange(server, head, b'{"prompt"')
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"timeout"' in answer


async def test_a_body_beyond_the_bound_is_refused(coordinator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_HTTP_BODY_BYTES", 1000)
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n"
    async with served(make_app(coordinator, None)) as server:
        answer = await exchange(server, head + b"x" * 1001)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"body_too_large"' in answer


async def test_what_is_no_http_is_refused(coordinator: Any) -> None:
    async with served(make_app(coordinator, None)) as server:
        assert (await exchange(server, b"\x16\x03\x01 hello\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


async def test_a_port_that_is_taken(coordinator: Any) -> None:
    async with served(make_app(coordinator, None)) as server:
        other = HttpServer(make_app(coordinator, None), "127.0.0.1", int(server.address.split(":")[1]))
        with pytest.raises(UnavailableError, match="cannot listen on"):
            await other.start()
        await other.stop(1)


async def test_an_answer_that_is_being_sent_is_finished_before_the_end() -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hello ", "more_body": True})
        begun.set()
        await may_end.wait()
        await send({"type": "http.response.body", "body": b"world", "more_body": False})

    server = HttpServer(slow, "127.0.0.1", 0)
    await server.start()
    answering = asyncio.create_task(exchange(server, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"))
    await begun.wait()
    stopping = asyncio.create_task(server.stop(HANG))
    await asyncio.sleep(0)
    may_end.set()
    assert b"world" in await answering
    await stopping
    with pytest.raises(OSError, match="Connect call failed"):
        await asyncio.open_connection(*server.address.split(":"))
