"""Trailers and lines between chunks are bounded."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from paceline.core import limits
from tests.unit.http.port import connected, send_body, served, server_end, start_answer

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
MUCH = 16 * limits.MAX_HTTP_HEAD_BYTES


class App:
    """Answers each request; with what its body was, or, as one without a key is, at once."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.at_once = at_once
        self.headers: list[list[tuple[bytes, bytes]]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        size, more = 0, not self.at_once
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size, more = size + len(message["body"]), message["more_body"]
        self.headers.append(scope["headers"])
        content = b"%d" % size
        await start_answer(send, length=len(content))
        await send_body(send, content)


early = pytest.mark.parametrize("at_once", [True, False], ids=["answered", "awaited"])


@pytest.mark.parametrize(
    ("begun", "piece"),
    [
        (b"0\r\n", b"a: b\r\n"),
        (b"0\r\na: ", b"b"),
        (b"0\r\n", b"b"),
        (b"1;a=", b"b"),
        (b"5\r\nhello\r\n1;a=", b"b"),
    ],
    ids=["many", "a long value", "a long name", "a line between chunks", "behind a chunk"],
)
@early
async def test_endless_trailers_are_cut_off(begun: bytes, piece: bytes, at_once: bool) -> None:
    """They must not be kept."""
    app = App(at_once=at_once)
    async with served(app) as server, connected(server) as (reader, writer):
        protocol = await server_end(server)
        writer.write(HEAD + begun)
        if at_once:
            await reader.readuntil(b"\r\n\r\n0")
        with contextlib.suppress(ConnectionError):
            for _ in range(MUCH // 4096):
                writer.write(piece * (4096 // len(piece)))
                await writer.drain()
            await reader.read()
        assert protocol.transport.is_closing()
        assert len(protocol.headers) == 2, "of the head"


async def test_trailers_are_read_and_dropped() -> None:
    app = App()
    chunk = b"10000\r\n" + b"#" * 65536 + b"\r\n"
    small = b"0\r\n" + b"x-a: b\r\nhost: y\r\n" * 100 + b"\r\n"
    async with served(app) as server, connected(server) as (reader, writer):
        for _ in range(3):
            writer.write(HEAD + chunk * 3 + small)
            answer = await reader.readuntil(b"%d" % (3 * 65536))
            assert answer.startswith(b"HTTP/1.1 200 ")
    assert [len(headers) for headers in app.headers] == [2] * 3


@early
async def test_a_body_in_any_pieces_is_not_a_trailer(at_once: bool) -> None:
    """Also with an early answer, and with long lines between chunks."""
    app = App(at_once=at_once)
    long_lines = (b"1;a=" + b"b" * 40_000 + b"\r\n#\r\n") * 5
    async with served(app) as server, connected(server) as (reader, _):
        protocol = await server_end(server)
        for chunks, size in ((b"100000\r\n" + b"#" * 0x100000 + b"\r\n", 0x100000), (long_lines, 5)):
            # By hand: how much comes in one read is the system's to say.
            protocol.data_received(HEAD)
            answer = b"%d" % (0 if at_once else size)
            if at_once:
                assert (await reader.readuntil(b"\r\n\r\n" + answer)).startswith(b"HTTP/1.1 200 ")
            for at in range(0, len(chunks), 10_000):
                protocol.data_received(chunks[at : at + 10_000])
            protocol.data_received(b"0\r\n\r\n")
            if not at_once:
                assert (await reader.readuntil(b"\r\n\r\n" + answer)).startswith(b"HTTP/1.1 200 ")
            assert not protocol.transport.is_closing()
    assert len(app.headers) == 2
