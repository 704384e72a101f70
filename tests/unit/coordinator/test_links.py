"""Sending and connection states of a link. Losing workers is tested with processes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.workers import links
from coordinator.workers.links import Link, LinkObserver, LinkState
from coordinator.workers.stream_protocol import TARGET
from paceline.core import limits
from paceline.core.errors import InvalidArgumentError, UnavailableError
from paceline.core.messages import CloseSequence
from paceline.core.security.tls import Tls
from paceline.rpc.streams import frames
from paceline.rpc.streams.unix_stream import LocalStream
from paceline.v1 import admin_pb2, admin_pb2_grpc, common_pb2, target_pb2

ONE, TWO = CloseSequence("one", 3), CloseSequence("two", 4)


class Beside(LocalStream):
    """A local stream that keeps its frames."""

    def __init__(self) -> None:
        self.commands: list[Any] = []

    def send(self, frame: bytes) -> None:
        self.commands.append(frames.target_commands(target_pb2.VerifyRequest.FromString(frame)))


def nothing(*_: Any) -> None:
    pass


def make_link(
    *,
    wants: Any = nothing,
    lost: Any = nothing,
    refused: Any = nothing,
    tls: Tls | None = None,
    address: str = "worker:1",
) -> Any:
    """A link to a target; `wants` is asked whether the worker is to be used."""
    return Link(address, TARGET, LinkObserver(wants, nothing, lost, nothing, refused), tls)


@pytest.fixture
async def link() -> Any:
    made = make_link()
    made.state = LinkState.READY
    return made


@contextlib.asynccontextmanager
async def running(link: Any, until: asyncio.Event) -> AsyncIterator[None]:
    """The link runs at least until then, and is not ended by what happened."""
    task = asyncio.create_task(link.run())
    async with asyncio.timeout(20):
        await until.wait()
    assert not task.done()
    yield
    task.cancel()


def answer_with(link: Any, answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker, or the way to it, says to being asked what it is."""
    monkeypatch.setattr(type(link.protocol), "info", answer)


async def test_a_local_stream_sends_the_queue_in_one_frame(link: Any) -> None:
    beside = link._stream = Beside()
    link.send(ONE)
    link.send(TWO)
    link.flush()
    link.flush()
    assert beside.commands == [[ONE, TWO]]
    assert not link._pending.is_set(), "the writer has nothing to do"


async def test_grpc_commands_are_left_to_the_writer(link: Any) -> None:
    link.send(ONE)
    link.flush()
    assert link._outbox == [ONE]
    assert link._pending.is_set()


async def test_commands_beyond_one_frame_take_several(link: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when all sequences of a returning target are opened at once."""
    commands = [CloseSequence(f"sequence {i}", i) for i in range(7)]
    monkeypatch.setattr(limits, "MAX_MESSAGE_BYTES", 2 * TARGET.request(commands[:1]).ByteSize())
    beside = link._stream = Beside()
    for command in commands:
        link.send(command)
    link.flush()
    assert [command for frame in beside.commands for command in frame] == commands
    assert max(map(len, beside.commands)) <= 2


async def test_an_unreadable_certificate_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be being renewed. Other links go on."""
    seen: list[LinkState] = []
    tried, link = asyncio.Event(), make_link()

    def unreadable(*_: Any) -> Any:
        seen.append(link.state)
        if len(seen) == 3:
            tried.set()
        raise InvalidArgumentError("tls_key", "cannot be read")

    monkeypatch.setattr(links, "open_aio_channel", unreadable)
    monkeypatch.setattr(links, "REFUSED_RETRY_SECONDS", 0.0)
    async with running(link, until=tried):
        assert seen == [LinkState.CONNECTING, LinkState.REFUSED, LinkState.REFUSED]
        assert "tls_key" in link.reason
        assert link.settled.is_set()


async def test_certificate_paths_appear_only_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients must not learn the server's paths."""
    files = {name: str(tmp_path / f"{name}.pem") for name in ("certificate", "key", "ca")}
    link = make_link(tls=Tls(**files))
    async with running(link, until=link.settled):
        assert link.reason == "worker_tls_certificate cannot be used"
    assert f"worker_tls_certificate: {files['certificate']} cannot be read" in caplog.text


@pytest.mark.parametrize("tls", [None, Tls()], ids=["plain text", "TLS"])
async def test_an_unreachable_worker_is_told_once_a_reason(
    tls: Tls | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    codes = [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED]
    tried = asyncio.Event()

    async def unreached(*_: Any) -> common_pb2.WorkerInfo:
        if not codes:
            tried.set()
            await asyncio.Event().wait()
        raise grpc.aio.AioRpcError(codes.pop(0), grpc.aio.Metadata(), grpc.aio.Metadata())

    monkeypatch.setattr(links, "RECONNECT_SECONDS", 0.0)
    reported: list[str] = []
    link = make_link(tls=tls, refused=lambda _link, reason: reported.append(reason))
    answer_with(link, unreached, monkeypatch)
    async with running(link, until=tried):
        pass
    lines = [record.getMessage() for record in caplog.records if record.name == links.__name__]
    assert len(lines) == 2
    for line, report, code in zip(lines, reported, ("unavailable", "deadline_exceeded"), strict=True):
        assert line.startswith(f"cannot reach the target worker at worker:1: {code}")
        assert report.startswith(f"it cannot be reached at worker:1: {code}")


class Drained(admin_pb2_grpc.AdminServiceServicer):
    """A worker that answers when it is told to."""

    def __init__(self) -> None:
        self.asked, self.answers = asyncio.Event(), asyncio.Event()

    async def Drain(self, _request: Any, _context: Any) -> admin_pb2.DrainResponse:  # noqa: N802
        self.asked.set()
        await self.answers.wait()
        return admin_pb2.DrainResponse(sequences=3)


async def test_an_order_outlasts_the_link() -> None:
    """A worker that drains is listed no longer before it answers."""
    worker, server = Drained(), grpc.aio.server()
    admin_pb2_grpc.add_AdminServiceServicer_to_server(worker, server)
    link = make_link(address=f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    running = asyncio.create_task(link.run())
    draining = asyncio.create_task(link.drain())
    async with asyncio.timeout(20):
        await worker.asked.wait()
        running.cancel()
        await asyncio.wait([running])
        worker.answers.set()
        assert (await draining).sequences == 3
    await server.stop(None)


async def told(*_: Any) -> common_pb2.WorkerInfo:
    return common_pb2.WorkerInfo()


async def test_a_worker_that_must_wait_is_not_called_unreachable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A draft without a target: the target's link says what is missing."""
    tried = asyncio.Event()

    def wait(*_: Any) -> None:
        tried.set()
        raise UnavailableError("no target worker is available")

    link = make_link(wants=wait)
    answer_with(link, told, monkeypatch)
    async with running(link, until=tried):
        assert link.reason == "no target worker is available"
    assert not caplog.records


async def test_a_worker_refused_while_serving_is_lost() -> None:
    lost: list[Link] = []
    link = make_link(lost=lost.append)
    link.state = LinkState.READY
    link._refuse(InvalidArgumentError("frame", "is too long"))
    assert (link.state, lost) == (LinkState.REFUSED, [link])


@pytest.mark.parametrize("where", ["the channel", "the session"])
async def test_a_system_error_does_not_end_the_link(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when descriptors run out at a reconnect."""
    tried, again = asyncio.Event(), asyncio.Event()

    def refused(*_: Any) -> Any:
        (again if tried.is_set() else tried).set()
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(links, "RECONNECT_SECONDS", 0.0)
    if where == "the channel":
        monkeypatch.setattr(links, "open_aio_channel", refused)
    link = make_link(wants=refused)
    answer_with(link, told, monkeypatch)
    async with running(link, until=again):
        pass


@pytest.mark.parametrize("error", [asyncio.CancelledError(), grpc.aio.UsageError("the channel is closed")])
async def test_a_worker_lost_during_a_query_keeps_its_last_info(
    link: Any, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed channel must not cancel the caller."""

    async def lost(*_: Any) -> Any:
        raise error

    answer_with(link, lost, monkeypatch)
    link._channel = object()
    link.known = common_pb2.WorkerInfo(model="it")
    assert await link.refresh() is link.known


async def test_a_status_query_may_be_cancelled(link: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any) -> Any:
        await asyncio.Event().wait()

    answer_with(link, never, monkeypatch)
    link._channel = object()
    asking = asyncio.create_task(link.refresh())
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_concurrent_status_queries_share_one_answer(link: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the first caller leaves. A query after the answer is sent anew."""
    asked, answering = 0, asyncio.Event()

    async def slow(*_: Any) -> common_pb2.WorkerInfo:
        nonlocal asked
        asked += 1
        number = asked
        await answering.wait()
        return common_pb2.WorkerInfo(process_id=number)

    answer_with(link, slow, monkeypatch)
    link._channel = object()
    async with asyncio.timeout(20):
        first, *others = [asyncio.create_task(link.refresh()) for _ in range(3)]
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        answering.set()
        told = await asyncio.gather(*others)
        assert [info.process_id for info in told if info is not None] == [1, 1]
        later = await link.refresh()
    assert (later.process_id, asked) == (2, 2)
