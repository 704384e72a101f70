"""The HTTP port: bounds on what a client may send, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from harness.refusals import refused

from coordinator.api.http.app import make_app
from coordinator.api.http.server import body
from coordinator.api.http.server import server as module
from coordinator.api.http.server.encoding import PIECE, JsonResponse
from coordinator.api.http.server.server import HttpServer
from paceline.core import limits
from paceline.core.errors import UnavailableError
from paceline.core.types import FinishReason
from tests.unit.http.api import COMPLETIONS, HANG, commit, script
from tests.unit.http.port import (
    connected,
    connections,
    exchange,
    post,
    send_body,
    served,
    server_end,
    start_answer,
)
from tests.unit.rpc.test_certificate_keys import GOOD, files

CLOSE = b"host: x\r\nconnection: close\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
VERSION = b"GET /version HTTP/1.1\r\n"
LAST = VERSION + CLOSE
LONG_PROMPT = b'{"prompt": "%s", "max_tokens": 1}' % (b"x" * 2 * limits.MAX_HTTP_HEAD_BYTES)


@pytest.fixture
async def server(coordinator: Any) -> AsyncIterator[HttpServer]:
    """It serves the whole application."""
    async with served(make_app(coordinator, None)) as made:
        yield made


async def test_a_request_is_served_over_a_real_connection(server: HttpServer) -> None:
    answer = await exchange(server, LAST)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"server:" not in answer.lower()


async def test_an_endless_head_is_refused(server: HttpServer) -> None:
    fitting = VERSION + b"x-a: %s\r\n" % (b"y" * (limits.MAX_HTTP_HEAD_BYTES - 200))
    answer = await exchange(server, fitting, b"x-b: %s\r\n" % (b"z" * 200))
    assert answer.startswith(b"HTTP/1.1 431 ")
    good = await exchange(server, fitting, CLOSE)
    assert good.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(("size", "status"), [(1, b"200"), (70_000, b"431")])
async def test_only_a_heads_own_bytes_count_for_its_bound(
    size: int, status: bytes, server: HttpServer
) -> None:
    """A large read may end within the first line of a head."""
    async with connected(server) as (reader, writer):
        protocol = await server_end(server)
        # By hand: how much comes in one read is the system's to say.
        protocol.data_received(post("/tokenize", LONG_PROMPT) + VERSION)
        protocol.data_received(b"x-a: %s\r\n" % (b"y" * size))
        if not protocol.transport.is_closing():
            writer.write(CLOSE)
        answer = await reader.read()
    assert b"HTTP/1.1 %s " % status in answer


def answering_after(may_answer: asyncio.Event, begun: asyncio.Event) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.set()
        await may_answer.wait()
        await start_answer(send, length=2)
        await send_body(send, b"ok")

    return app


# Three requests and the first line of a fourth: with two that wait for their turn nothing more is read.
UNREAD = GET * 3 + b"GET / HTTP/1.1\r\n"


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


async def test_body_bytes_do_not_count_as_head(server: HttpServer) -> None:
    answer = await exchange(server, post("/tokenize", LONG_PROMPT), LAST)
    assert b"max_tokens" in answer  # unknown to /tokenize, so the body was read
    assert answer.count(b"HTTP/1.1 200 ") == 1


@pytest.mark.parametrize("begun", [b"", b"GET /version HTTP/1.1\r\nhost:"])
async def test_an_unfinished_head_is_disconnected(
    begun: bytes, server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEAD_SECONDS", 0.05)
    assert await exchange(server, begun) == b""


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (post("/tokenize", b'{"prompt"}')[:-1], 408, b"timeout"),
        (post("/tokenize", b"x" * 5000)[:-3999], 413, b"body_too_large"),
        (b"\x16\x03\x01 hello\r\n\r\n", 400, b""),
    ],
    ids=["an unfinished body", "a too large body", "other than HTTP"],
)
async def test_a_body_that_is_late_or_too_large_is_refused(
    sent: bytes, status: int, code: bytes, server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "BODY_SECONDS", 0.05 if status == 408 else HANG)
    monkeypatch.setattr(limits, "MAX_HTTP_BODY_BYTES", 1000)
    answer = await exchange(server, sent)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert not code or b'"code":"%s"' % code in answer


CURL_OFFERS = (
    b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
)
BROWSERS_OFFER = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
BODY = b'{"tokens": [523, 614]}'
PROMPT = b'{"prompt":"def ma"}'


def detokenize(offer: bytes) -> bytes:
    return post("/detokenize", BODY, offer)


@pytest.mark.parametrize("offer", [CURL_OFFERS, BROWSERS_OFFER])
@pytest.mark.parametrize("pieces", ["one", "head", "many"])
async def test_an_upgrade_offer_is_ignored(offer: bytes, pieces: str, server: HttpServer) -> None:
    request = detokenize(offer)
    head = request.removesuffix(BODY)
    sent = {
        "one": [request + LAST],
        "head": [head, BODY, LAST],
        "many": [bytes([byte]) for byte in request + LAST],
    }
    answer = await exchange(server, *sent[pieces])
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == answer.count(b"HTTP/1.1 ") == 2
    assert answer.index(PROMPT) < answer.index(b'"version"')


async def test_every_request_may_offer_an_upgrade(server: HttpServer) -> None:
    chunked = b"POST /detokenize HTTP/1.1\r\nhost: x\r\n%stransfer-encoding: chunked\r\n\r\n" % CURL_OFFERS
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    last = detokenize(CURL_OFFERS.replace(b"Upgrade,", b"Upgrade, close,"))
    answer = await exchange(server, detokenize(CURL_OFFERS) + chunked + chunks + detokenize(b"") + last)
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == answer.count(PROMPT) == 4
    assert answer.count(b"HTTP/1.1 ") == 4


async def test_bytes_after_connect_are_not_a_request(server: HttpServer) -> None:
    answer = await exchange(server, b"CONNECT x:1 HTTP/1.1\r\n" + CLOSE + LAST)
    assert answer.startswith(b"HTTP/1.1 4")
    assert answer.count(b"HTTP/1.1 ") == 1


async def test_line_ends_between_requests_do_not_keep_it_open(
    coordinator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEEP_ALIVE_SECONDS", 0.05)
    async with served(make_app(coordinator, None)) as server, connected(server) as (reader, writer):
        writer.write(VERSION + b"host: x\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        await reader.readuntil(b"}")
        writer.write(b"\r\n")
        assert await reader.read() == b""


async def test_an_unread_body_does_not_keep_it_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refusing(scope: Any, receive: Any, send: Any) -> None:
        await start_answer(send, 401, length=2)
        await send_body(send, b"no")

    monkeypatch.setattr(module, "KEEP_ALIVE_SECONDS", 0.05)
    async with served(refusing) as server, connected(server) as (reader, writer):
        writer.write(detokenize(b"").removesuffix(BODY))
        assert await reader.readuntil(b"no")
        writer.write(BODY)
        assert await reader.read() == b""


@pytest.mark.parametrize("together", [True, False])
async def test_a_client_leaving_after_its_next_request_is_noticed(
    together: bool, coordinator: Any, server: HttpServer
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
    request, following = post(COMPLETIONS, b'{"prompt": "x"}'), VERSION + b"host: x\r\n\r\n"
    async with connected(server) as (_, writer):
        writer.write(request + following if together else request)
        await begun.wait()
        if not together:
            writer.write(following)
    async with asyncio.timeout(HANG):
        await ended.wait()


async def test_a_cut_answers_connection_does_not_wait(
    coordinator: Any, server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    tasks: list[asyncio.Task[Any] | None] = []

    async def endless(_: Any) -> AsyncIterator[Any]:
        tasks.append(asyncio.current_task())
        while True:
            yield commit(0, 65536 * "x")

    coordinator.script = endless
    async with connected(server) as (_, writer):
        writer.write(post(COMPLETIONS, b'{"prompt": "x", "stream": true}'))
        while not any(protocol.flow.write_paused for protocol in connections(server)):  # noqa: ASYNC110
            await asyncio.sleep(0)
        (working,) = tasks
        working.cancel()
        while connections(server):  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


# ---- start and stop ------------------------------------------------------------------------------------


async def test_an_occupied_port_is_an_error(coordinator: Any, server: HttpServer) -> None:
    other = HttpServer(make_app(coordinator, None), "127.0.0.1", int(server.address.split(":")[1]))
    with pytest.raises(UnavailableError, match="cannot listen on"):
        await other.start()
    await other.stop(1)


async def test_a_failed_server_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    server = HttpServer(None, "127.0.0.1", 0)  # type: ignore[arg-type]

    def fail() -> None:
        raise OSError("no more descriptors")

    monkeypatch.setattr(server._uvicorn.config, "load", fail)
    async with asyncio.timeout(HANG):
        with pytest.raises(UnavailableError, match=r"cannot serve HTTP on 127\.0\.0\.1:") as caught:
            await server.start()
        await server.stop(1)
    assert isinstance(caught.value.__cause__, OSError)


async def test_a_half_replaced_certificate_is_named(tmp_path: Path) -> None:
    """The new key is there, the new certificate is not."""
    (old := tmp_path / "old").mkdir()
    (new := tmp_path / "new").mkdir()
    tls, renewed = files(old, GOOD["P-256"]()), files(new, GOOD["P-256"]())
    server = HttpServer(None, "127.0.0.1", 0, tls)  # type: ignore[arg-type]
    shutil.copy(renewed.key, tls.key)
    async with asyncio.timeout(HANG):
        with refused("tls_key"):
            await server.start()
        await server.stop(1)


@pytest.mark.parametrize(
    ("path", "statuses"),
    [("/v1/models", (200, 503)), ("/version", (200, 503)), ("/ping", (200, 200)), ("/metrics", (200, 200))],
)
async def test_a_stop_refuses_all_but_health_and_metrics(
    coordinator: Any, server: HttpServer, path: str, statuses: tuple[int, int]
) -> None:
    """`/ping` follows the coordinator, which says here that it serves."""
    for draining, status in zip((False, True), statuses, strict=True):
        coordinator.draining = draining
        answer = await exchange(server, f"GET {path} HTTP/1.1\r\n".encode() + CLOSE)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert (b'"code":"service_unavailable"' in answer) is (status == 503)


async def test_a_request_overtaken_by_the_stop_gets_our_error(coordinator: Any, server: HttpServer) -> None:
    """While its body is missing, or while it waits for a target."""
    coordinator.found.clear()
    request = post(COMPLETIONS, b'{"prompt": "x"}')
    asking = [asyncio.create_task(exchange(server, sent)) for sent in (request[:-9], request)]
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
        await start_answer(send)
        await send_body(send, b"hello ", more=True)
        begun.set()
        await may_end.wait()
        await send_body(send, b"world")

    async with served(slow) as server:
        answering = asyncio.create_task(exchange(server, GET))
        await begun.wait()
        stopping = asyncio.create_task(server.stop(HANG))
        await asyncio.sleep(0)
        may_end.set()
        assert b"world" in await answering
        await stopping
        with pytest.raises(OSError, match="Connect call failed"):
            await asyncio.open_connection(*server.address.split(":"))


# ---- clients that take little --------------------------------------------------------------------------

WHOLE = 16 * 1024 * 1024


async def at_once(scope: Any, receive: Any, send: Any) -> None:
    await start_answer(send)
    await send_body(send, b"#" * WHOLE)


async def in_pieces(scope: Any, receive: Any, send: Any) -> None:
    await JsonResponse("#" * WHOLE)(scope, receive, send)


@pytest.mark.parametrize("header", [b"", b"connection: close\r\n"])
@pytest.mark.parametrize("app", [at_once, in_pieces])
async def test_a_client_that_stops_reading_is_cut(app: Any, header: bytes) -> None:
    """The answer must not stay in the connection's buffer."""
    async with served(app, unread_timeout=0.05) as server, connected(server) as (reader, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n" + header + b"\r\n")
        await server_end(server)
        while connections(server):  # noqa: ASYNC110
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
        writer.write(GET * 2)
        left = 2 * WHOLE
        while left > 0:
            left -= (await reader.read(65536)).count(b"#")
            await asyncio.sleep(0)
        assert left == 0
        assert connections(server)


async def test_a_client_reading_piece_by_piece_is_not_cut(coordinator: Any, server: HttpServer) -> None:
    """Its request counts as read with each piece."""
    coordinator.script = script(commit(0, "x" * 10 * PIECE, FinishReason.LENGTH))
    answer = await exchange(server, post(COMPLETIONS, b'{"prompt": "x"}', b"connection: close\r\n"))
    assert answer.count(b"x") >= 10 * PIECE
    assert coordinator.taken == 11
