"""The HTTP port: bounds on what a client may send, and its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from coordinator.api.http.app import make_app
from coordinator.api.http.server import body
from coordinator.api.http.server import server as module
from coordinator.api.http.server.encoding import PIECE, JsonResponse
from coordinator.api.http.server.server import HttpServer
from paceline.core import limits
from paceline.core.errors import UnavailableError
from paceline.core.types import FinishReason

HANG = 30.0


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


CLOSE = b"host: x\r\nconnection: close\r\n\r\n"


async def test_a_request_is_served_over_a_real_connection(coordinator: Any) -> None:
    async with served(make_app(coordinator, None)) as server:
        answer = await exchange(server, b"GET /version HTTP/1.1\r\n" + CLOSE)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"server:" not in answer.lower()


async def test_an_endless_head_is_refused(coordinator: Any) -> None:
    line = b"GET /version HTTP/1.1\r\n"
    fitting = b"x-a: %s\r\n" % (b"y" * (limits.MAX_HTTP_HEAD_BYTES - 200))
    async with served(make_app(coordinator, None)) as server:
        answer = await exchange(server, line + fitting, b"x-b: %s\r\n" % (b"z" * 200))
        assert answer.startswith(b"HTTP/1.1 431 ")
        good = await exchange(server, line + fitting, CLOSE)
        assert good.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(("size", "status"), [(1, b"200"), (70_000, b"431")])
async def test_only_a_heads_own_bytes_count_for_its_bound(size: int, status: bytes, coordinator: Any) -> None:
    """A large read may end within the first line of a head."""
    large = b'{"prompt": "%s", "max_tokens": 1}' % (b"x" * 2 * limits.MAX_HTTP_HEAD_BYTES)
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(large)
    async with served(make_app(coordinator, None)) as server, connected(server) as (reader, writer):
        while not (connections := server._uvicorn.server_state.connections):  # noqa: ASYNC110
            await asyncio.sleep(0)
        (protocol,) = connections
        # By hand: how much comes in one read is the system's to say.
        for read in (head + large + b"GET /version HTTP/1.1\r\n", b"x-a: %s\r\n" % (b"y" * size)):
            protocol.data_received(read)
        if not protocol.transport.is_closing():
            writer.write(CLOSE)
        answer = await reader.read()
    assert b"HTTP/1.1 %s " % status in answer


def answering_after(may_answer: asyncio.Event, begun: asyncio.Event) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.set()
        await may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    return app


# Three requests and the first line of a fourth: with two that wait for their turn nothing more is read.
UNREAD = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 3 + b"GET / HTTP/1.1\r\n"


async def test_a_client_not_being_read_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server itself has stopped reading."""
    may_answer = asyncio.Event()
    monkeypatch.setattr(module, "HEAD_SECONDS", 0.1)
    app = answering_after(may_answer, asyncio.Event())
    async with served(app) as server, connected(server) as (reader, writer):
        writer.write(UNREAD)
        await asyncio.sleep(0.3)
        monkeypatch.setattr(module, "HEAD_SECONDS", 10 * HANG)
        may_answer.set()
        writer.write(CLOSE)
        answers = await reader.read()
    assert answers.count(b"HTTP/1.1 200 ") == 4


async def test_the_head_timeout_restarts_with_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    may_answer, begun = asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(module, "HEAD_SECONDS", 10 * HANG)
    async with served(answering_after(may_answer, begun)) as server, connected(server) as (reader, writer):
        writer.write(UNREAD)
        await begun.wait()
        monkeypatch.setattr(module, "HEAD_SECONDS", 0.05)
        may_answer.set()
        await reader.read()  # until the client is let go: the fourth head does not come


async def test_body_bytes_do_not_count_as_head(coordinator: Any) -> None:
    prompt = b'{"prompt": "%s", "max_tokens": 1}' % (b"x" * 2 * limits.MAX_HTTP_HEAD_BYTES)
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(prompt)
    async with served(make_app(coordinator, None)) as server:
        answer = await exchange(server, head + prompt, b"GET /version HTTP/1.1\r\n" + CLOSE)
    assert b"max_tokens" in answer  # unknown to /tokenize, so the body was read
    assert answer.count(b"HTTP/1.1 200 ") == 1


@pytest.mark.parametrize("begun", [b"", b"GET /version HTTP/1.1\r\nhost:"])
async def test_an_unfinished_head_is_disconnected(
    begun: bytes, coordinator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEAD_SECONDS", 0.05)
    async with served(make_app(coordinator, None)) as server:
        assert await exchange(server, begun) == b""


async def test_an_unfinished_body_is_a_timeout_error(
    coordinator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "BODY_SECONDS", 0.05)
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
    async with served(make_app(coordinator, None)) as server:
        answer = await exchange(server, head, b'{"prompt"')
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"timeout"' in answer


async def test_a_too_large_body_is_refused(coordinator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_HTTP_BODY_BYTES", 1000)
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n"
    async with served(make_app(coordinator, None)) as server:
        answer = await exchange(server, head + b"x" * 1001)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"body_too_large"' in answer


async def test_bytes_other_than_http_are_refused(coordinator: Any) -> None:
    async with served(make_app(coordinator, None)) as server:
        assert (await exchange(server, b"\x16\x03\x01 hello\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


CURL_OFFERS = (
    b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
)
BROWSERS_OFFER = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
BODY = b'{"tokens": [523, 614]}'
PROMPT = b'{"prompt":"def ma"}'


def detokenize(more: bytes) -> bytes:
    """The head of a request with BODY."""
    return b"POST /detokenize HTTP/1.1\r\nhost: x\r\n%scontent-length: %d\r\n" % (more, len(BODY))


@pytest.mark.parametrize("offer", [CURL_OFFERS, BROWSERS_OFFER])
@pytest.mark.parametrize("pieces", ["one", "head", "many"])
async def test_an_upgrade_offer_is_ignored(offer: bytes, pieces: str, coordinator: Any) -> None:
    head = detokenize(offer) + b"\r\n"
    last = b"GET /version HTTP/1.1\r\n" + CLOSE
    sent = {
        "one": [head + BODY + last],
        "head": [head, BODY, last],
        "many": [bytes([byte]) for byte in head + BODY + last],
    }
    async with served(make_app(coordinator, None)) as server:
        answer = await exchange(server, *sent[pieces])
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == answer.count(b"HTTP/1.1 ") == 2
    assert answer.index(PROMPT) < answer.index(b'"version"')


async def test_every_request_may_offer_an_upgrade(coordinator: Any) -> None:
    chunked = b"POST /detokenize HTTP/1.1\r\nhost: x\r\n%stransfer-encoding: chunked\r\n\r\n" % CURL_OFFERS
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    plain = detokenize(b"") + b"\r\n" + BODY
    offering = detokenize(CURL_OFFERS) + b"\r\n" + BODY
    last = detokenize(CURL_OFFERS.replace(b"Upgrade,", b"Upgrade, close,")) + b"\r\n" + BODY
    async with served(make_app(coordinator, None)) as server:
        answer = await exchange(server, offering + chunked + chunks + plain + last)
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == answer.count(PROMPT) == 4
    assert answer.count(b"HTTP/1.1 ") == 4


async def test_bytes_after_connect_are_not_a_request(coordinator: Any) -> None:
    async with served(make_app(coordinator, None)) as server:
        answer = await exchange(
            server, b"CONNECT x:1 HTTP/1.1\r\n" + CLOSE + b"GET /version HTTP/1.1\r\n" + CLOSE
        )
    assert answer.startswith(b"HTTP/1.1 4")
    assert answer.count(b"HTTP/1.1 ") == 1


async def test_line_ends_between_requests_do_not_keep_it_open(
    coordinator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEEP_ALIVE_SECONDS", 0.05)
    async with served(make_app(coordinator, None)) as server, connected(server) as (reader, writer):
        writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        await reader.readuntil(b"}")
        writer.write(b"\r\n")
        assert await reader.read() == b""


async def test_an_unread_body_does_not_keep_it_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refusing(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"no"})

    monkeypatch.setattr(module, "KEEP_ALIVE_SECONDS", 0.05)
    async with served(refusing) as server, connected(server) as (reader, writer):
        writer.write(detokenize(b"") + b"\r\n")
        assert await reader.readuntil(b"no")
        writer.write(BODY)
        assert await reader.read() == b""


@pytest.mark.parametrize("together", [True, False])
async def test_a_client_leaving_after_its_next_request_is_noticed(
    together: bool, coordinator: Any, commit: Any
) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def endless(_: Any) -> AsyncIterator[Any]:
        try:
            yield commit(0, "x")
            begun.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    coordinator.script = endless
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 15\r\n\r\n" + b'{"prompt": "x"}'
    following = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    async with served(make_app(coordinator, None)) as server:
        async with connected(server) as (_, writer):
            writer.write(request + following if together else request)
            await begun.wait()
            if not together:
                writer.write(following)
        async with asyncio.timeout(HANG):
            await ended.wait()


async def test_a_cut_answers_connection_does_not_wait(
    coordinator: Any, commit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tasks: list[asyncio.Task[Any] | None] = []

    async def endless(_: Any) -> AsyncIterator[Any]:
        tasks.append(asyncio.current_task())
        while True:
            yield commit(0, 65536 * "x")

    coordinator.script = endless
    content = b'{"prompt": "x", "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content)
    async with served(make_app(coordinator, None)) as server, connected(server) as (_, writer):
        writer.write(head + content)
        connections = server._uvicorn.server_state.connections
        while not any(protocol.flow.write_paused for protocol in connections):  # noqa: ASYNC110
            await asyncio.sleep(0)
        (working,) = tasks
        assert working is not None
        working.cancel()
        while connections:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


async def test_an_occupied_port_is_an_error(coordinator: Any) -> None:
    async with served(make_app(coordinator, None)) as server:
        other = HttpServer(make_app(coordinator, None), "127.0.0.1", int(server.address.split(":")[1]))
        with pytest.raises(UnavailableError, match="cannot listen on"):
            await other.start()
        await other.stop(1)


@pytest.mark.parametrize(
    ("path", "statuses"),
    [("/v1/models", (200, 503)), ("/version", (200, 503)), ("/ping", (200, 200)), ("/metrics", (200, 200))],
)
async def test_a_stop_refuses_all_but_health_and_metrics(
    coordinator: Any, path: str, statuses: tuple[int, int]
) -> None:
    """`/ping` follows the coordinator, which says here that it serves."""
    head = f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()
    async with served(make_app(coordinator, None)) as server:
        for draining, status in zip((False, True), statuses, strict=True):
            coordinator.draining = draining
            answer = await exchange(server, head)
            assert answer.startswith(f"HTTP/1.1 {status} ".encode())
            assert (b'"code":"service_unavailable"' in answer) is (status == 503)


async def test_a_request_overtaken_by_the_stop_gets_our_error(coordinator: Any) -> None:
    """While its body is missing, or while it waits for a target."""
    coordinator.found.clear()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 15\r\n\r\n"
    server = HttpServer(make_app(coordinator, None), "127.0.0.1", 0)
    await server.start()
    asking = [asyncio.create_task(exchange(server, head, body)) for body in (b'{"pro', b'{"prompt": "x"}')]
    while len(server._uvicorn.server_state.tasks) < len(asking):  # noqa: ASYNC110
        await asyncio.sleep(0)
    coordinator.draining = True
    await server.stop(0)
    for answer in await asyncio.gather(*asking):
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b'"code":"service_unavailable"' in answer
        assert b"retry-after: 1" in answer
    assert [status for _, _, status in coordinator.metrics.http_calls] == ["503"]


async def test_an_answer_being_sent_is_finished_before_the_stop() -> None:
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


WHOLE = 16 * 1024 * 1024


async def at_once(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"#" * WHOLE, "more_body": False})


async def in_pieces(scope: Any, receive: Any, send: Any) -> None:
    await JsonResponse("#" * WHOLE)(scope, receive, send)


@pytest.mark.parametrize("header", [b"", b"connection: close\r\n"])
@pytest.mark.parametrize("app", [at_once, in_pieces])
async def test_a_client_that_stops_reading_is_cut(app: Any, header: bytes) -> None:
    """The answer must not stay in the connection's buffer."""
    async with served(app, unread_timeout=0.05) as server, connected(server) as (reader, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n" + header + b"\r\n")
        connections = server._uvicorn.server_state.connections
        while not connections:  # noqa: ASYNC110
            await asyncio.sleep(0)
        while connections:  # noqa: ASYNC110
            await asyncio.sleep(0)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        came = 0
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(WHOLE):
                came += len(data)
        assert came < WHOLE


@pytest.mark.parametrize("app", [at_once, in_pieces])
async def test_a_slow_reader_gets_the_whole_answer(app: Any) -> None:
    async with served(app, unread_timeout=5.0) as server, connected(server) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 2)
        left = 2 * WHOLE
        while left > 0:
            left -= (await reader.read(65536)).count(b"#")
            await asyncio.sleep(0)
        assert left == 0
        assert server._uvicorn.server_state.connections


async def test_a_client_reading_piece_by_piece_is_not_cut(coordinator: Any, commit: Any) -> None:
    """Its request counts as read with each piece."""

    async def script(_: Any) -> AsyncIterator[Any]:
        yield commit(0, "x" * 10 * PIECE, finish=FinishReason.LENGTH)

    coordinator.script = script
    content = b'{"prompt": "x"}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    async with served(make_app(coordinator, None)) as server:
        answer = await exchange(server, head % len(content) + content)
    assert answer.count(b"x") >= 10 * PIECE
    assert coordinator.taken == 11
