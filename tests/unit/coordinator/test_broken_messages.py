"""Workers that send invalid messages, over real links and gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from coordinator.workers import links
from coordinator.workers.links import Link, LinkObserver, LinkState
from coordinator.workers.stream_protocol import DRAFT, TARGET, StreamProtocol
from paceline.v1 import common_pb2, draft_pb2, target_pb2

SECONDS = 20.0
RUBBISH = b"\xff"
ANSWERS = {
    TARGET: target_pb2.TargetServiceGetWorkerInfoResponse,
    DRAFT: draft_pb2.DraftServiceGetWorkerInfoResponse,
}


class Worker:
    """Says what it is in its first `sound` answers, and sends rubbish after that and in its stream."""

    def __init__(self, protocol: StreamProtocol, sound: int) -> None:
        info = common_pb2.WorkerInfo(role=protocol.role, model="it")
        self._told = ANSWERS[protocol](info=info).SerializeToString()
        self._sound = sound
        self.asked = 0
        self.streams = 0
        self.address = ""

    async def info(self, _request: bytes, _context: Any) -> bytes:
        self.asked += 1
        return self._told if self.asked <= self._sound else RUBBISH

    async def stream(self, _requests: Any, context: Any) -> None:
        self.streams += 1
        await context.write(RUBBISH)
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def serving(protocol: StreamProtocol, sound: int) -> AsyncIterator[Worker]:
    worker, server = Worker(protocol, sound), grpc.aio.server()
    methods = {
        "GetWorkerInfo": grpc.unary_unary_rpc_method_handler(worker.info),
        protocol.stream: grpc.stream_stream_rpc_method_handler(worker.stream),
    }
    name = f"paceline.v1.{protocol.role.capitalize()}Service"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, methods),))
    worker.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield worker
    finally:
        await server.stop(None)


class Seen:
    """What a link tells."""

    def __init__(self) -> None:
        self.states: list[LinkState] = []
        self.events: list[Any] = []

    def link(self, address: str, protocol: StreamProtocol) -> Link:
        def note(link: Link) -> None:
            self.states.append(link.state)

        observer = LinkObserver(lambda *_: None, note, note, lambda _, events: self.events.extend(events))
        return Link(address, protocol, observer)


async def until(running: asyncio.Task[None], reached: Callable[[], bool]) -> None:
    """Let a link run until then. Raises what ends it before."""
    async with asyncio.timeout(SECONDS):
        while not reached():
            if running.done():
                await running
                raise AssertionError("the link ended")
            await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def _links_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "RECONNECT_SECONDS", 0.0)


@pytest.mark.parametrize("protocol", [TARGET, DRAFT], ids=["target", "draft"])
async def test_a_stream_with_an_invalid_message_is_reopened(protocol: StreamProtocol) -> None:
    """Other links go on."""
    seen = Seen()
    async with serving(protocol, sound=100) as worker:
        link = seen.link(worker.address, protocol)
        running = asyncio.create_task(link.run())
        await until(running, lambda: worker.streams >= 2 and len(seen.states) >= 3)
        running.cancel()
        await asyncio.wait([running])
    assert seen.states[:3] == [LinkState.READY, LinkState.LOST, LinkState.READY]
    assert seen.events == []


@pytest.mark.parametrize("protocol", [TARGET, DRAFT], ids=["target", "draft"])
async def test_an_invalid_answer_is_requested_again(protocol: StreamProtocol) -> None:
    seen = Seen()
    async with serving(protocol, sound=0) as worker:
        link = seen.link(worker.address, protocol)
        running = asyncio.create_task(link.run())
        await until(running, lambda: worker.asked >= 2)
        assert (link.state, link.known) == (LinkState.CONNECTING, None)
        assert link.reason == "it sends bytes that are not a message"
        running.cancel()
        await asyncio.wait([running])
    assert seen.states == []


async def test_an_invalid_status_keeps_the_previous_one() -> None:
    seen = Seen()
    async with serving(TARGET, sound=0) as worker, grpc.aio.insecure_channel(worker.address) as channel:
        link = seen.link(worker.address, TARGET)
        link.state, link._channel = LinkState.READY, channel
        link.known = common_pb2.WorkerInfo(model="it")
        assert await link.refresh() is link.known
    assert link.known.model == "it"
