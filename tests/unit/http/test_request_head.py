"""Heads that a proxy might read differently are refused and their connection closed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from coordinator.api.http.server.server import HttpServer
from tests.unit.http.port import exchange, send_body, served, start_answer

GET, POST = b"GET /p HTTP/1.1\r\n", b"POST /p HTTP/1.1\r\nhost: x\r\n"
CHUNKS = b"\r\n3\r\nabc\r\n0\r\n\r\n"
OFFER = b"connection: upgrade\r\nupgrade: h2c\r\n"

REFUSED = {
    "no host": GET + b"\r\n",
    "two hosts": GET + b"host: x\r\nhost: y\r\n\r\n",
    "one host twice": GET + b"host: x\r\nHost: x\r\n\r\n",
    "two hosts of 1.0": b"GET /p HTTP/1.0\r\nhost: x\r\nhost: y\r\n\r\n",
    "a host with a space": GET + b"host: a b\r\n\r\n",
    "a list of hosts": GET + b"host: a, b\r\n\r\n",
    "a host with a path": GET + b"host: a/b\r\n\r\n",
    "a user at a host": GET + b"host: a@b\r\n\r\n",
    "another target": b"GET http://y/p HTTP/1.1\r\nhost: x\r\n\r\n",
    "a target with a user": b"GET http://u@x/p HTTP/1.1\r\nhost: x\r\n\r\n",
    "gzip, chunked": POST + b"transfer-encoding: gzip, chunked\r\n" + CHUNKS,
    "chunked, gzip": POST + b"transfer-encoding: chunked, gzip\r\n" + CHUNKS,
    "gzip and chunked": POST + b"transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n" + CHUNKS,
    "chunked twice": POST + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n" + CHUNKS,
    "identity": POST + b"transfer-encoding: identity\r\n\r\n",
    "xchunked": POST + b"transfer-encoding: xchunked\r\n" + CHUNKS,
    "vertical tab": POST + b"transfer-encoding: \x0bchunked\r\n" + CHUNKS,
    "chunked in 1.0": b"POST /p HTTP/1.0\r\nhost: x\r\ntransfer-encoding: chunked\r\n" + CHUNKS,
    "behind an offer": POST + OFFER + b"transfer-encoding: gzip, chunked\r\n" + CHUNKS,
    "hosts behind an offer": GET + b"host: x\r\nhost: y\r\n" + OFFER + b"\r\n",
    "two lengths": POST + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
    "one length twice": POST + b"content-length: 3\r\ncontent-length: 3\r\n\r\nabc",
    "a list of lengths": POST + b"content-length: 3, 3\r\n\r\nabc",
    "a signed length": POST + b"content-length: +3\r\n\r\nabc",
    "no length": POST + b"content-length:\r\n\r\n",
    "a length too long": POST + b"content-length: 99999999999999999999999\r\n\r\n",
    "length, chunked": POST + b"content-length: 3\r\ntransfer-encoding: chunked\r\n" + CHUNKS,
    "chunked, length": POST + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n" + CHUNKS,
    "a space after a name": POST + b"content-length : 3\r\n\r\nabc",
    "a folded line": GET + b"host: x\r\nx-a: b\r\n c\r\n\r\n",
    "a folded coding": POST + b"transfer-encoding:\r\n chunked\r\n" + CHUNKS,
    "a negative chunk": POST + b"transfer-encoding: chunked\r\n\r\n-3\r\nabc\r\n0\r\n\r\n",
    "0x": POST + b"transfer-encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n",
    "a space after a size": POST + b"transfer-encoding: chunked\r\n\r\n3 \r\nabc\r\n0\r\n\r\n",
    "a size too long": POST + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\nabc\r\n0\r\n\r\n",
    "no size": POST + b"transfer-encoding: chunked\r\n\r\n\r\nabc\r\n0\r\n\r\n",
    "no end of a chunk": POST + b"transfer-encoding: chunked\r\n\r\n3\r\nabcX0\r\n\r\n",
    "a line feed alone": GET + b"host: x\r\nx-a: b\rc\r\n\r\n",
    "HTTP/2.0": b"GET /p HTTP/2.0\r\nhost: x\r\n\r\n",
    "HTTP/1.2": b"GET /p HTTP/1.2\r\nhost: x\r\n\r\n",
    "HTTP/0.9": b"GET /p\r\n\r\n",
}
TAKEN = {
    "chunked": POST + b"Transfer-Encoding: Chunked\r\n" + CHUNKS,
    "a chunk's extension": POST + b"transfer-encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0\r\n\r\n",
    "what codings are taken": POST + b"te: trailers\r\ncontent-length: 3\r\n\r\nabc",
    "1.0": b"GET /p HTTP/1.0\r\n\r\n",
    "a port": GET + b"host: example.com:8000\r\n\r\n",
    "IPv6": GET + b"host: [::1]:8000\r\n\r\n",
    "an empty host": GET + b"host:\r\n\r\n",
    "absolute": b"GET http://X/p HTTP/1.1\r\nhost: x\r\n\r\n",
    "a URL in a query": b"GET /p?u=http://y/ HTTP/1.1\r\nhost: x\r\n\r\n",
}
NEXT = b"GET /next HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


paths: list[str] = []
"""The paths of what was served."""


async def app(scope: Any, receive: Any, send: Any) -> None:
    paths.append(scope["path"])
    while (await receive()).get("more_body"):
        pass
    await start_answer(send, length=0)
    await send_body(send, b"")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[HttpServer]:
    """One for all: a port takes a while to stop."""
    async with served(app) as made:
        yield made


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", REFUSED)
async def test_an_ambiguous_head_is_refused(name: str, server: HttpServer) -> None:
    paths.clear()
    answer = await exchange(server, REFUSED[name] + NEXT)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert "/next" not in paths


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", TAKEN)
async def test_an_unambiguous_head_is_accepted(name: str, server: HttpServer) -> None:
    paths.clear()
    answer = await exchange(server, TAKEN[name] + NEXT)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert paths == (["/p"] if name == "1.0" else ["/p", "/next"])
