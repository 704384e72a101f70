"""The end of a server process: draining, the end of the drain, and giving up at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness.commands import LOADING, running
from harness.refusals import ends_with
from harness.waiting import HANG

from paceline.rpc.codec.status import from_rpc_error
from paceline.rpc.server import server as module
from paceline.rpc.server.server import Server

METHOD = "/test.Test/Stream"
CHILD = """
import asyncio, sys
from paceline.rpc.server.server import Server

async def drained():
    pass

async def serve(exit_with_parent):
    server = Server("test", "127.0.0.1", 0)
    await server.start()
    server.heed_signals(exit_with_parent=exit_with_parent)
    server.announce()
    await server.run_until_stopped(drain=drained)

asyncio.run(serve(sys.argv[1] == "with its parent"))
"""


class Slow:
    """One stream that says hello, then waits until the test lets it end."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"hello"
        await self.may_end.wait()
        yield b"goodbye"


async def drained() -> None:
    """Nothing is waited for."""


@dataclass
class Serving:
    """A server with a call to `Slow` that has begun."""

    server: Server
    channel: grpc.aio.Channel
    call: Any
    ended: asyncio.Task[None]


@contextlib.asynccontextmanager
async def serving(slow: Slow, drain: Callable[[], Awaitable[object]] = drained) -> AsyncIterator[Serving]:
    """When the block ends the server has ended by itself."""
    server = Server("test", "127.0.0.1", 0)
    handler = grpc.unary_stream_rpc_method_handler(slow.stream)
    server.grpc.add_registered_method_handlers("test.Test", {"Stream": handler})
    await server.start()
    ended = asyncio.create_task(server.run_until_stopped(drain=drain))
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = channel.unary_stream(METHOD)(b"")
        assert await call.read() == b"hello"
        yield Serving(server, channel, call, ended)
        await asyncio.wait_for(ended, HANG)


async def test_a_running_call_finishes_before_the_process_ends() -> None:
    slow = Slow()
    async with serving(slow, slow.may_end.wait) as it:
        it.server.request_stop()
        await asyncio.sleep(0)
        slow.may_end.set()
        assert await it.call.read() == b"goodbye"
        assert await it.call.read() is grpc.aio.EOF


async def test_calls_longer_than_the_drain_end_with_an_error() -> None:
    slow = Slow()

    async def drain() -> None:
        slow.may_end.set()

    async with serving(slow, drain) as it:
        it.server.request_stop()
        assert await it.call.read() == b"goodbye"


@pytest.mark.parametrize("how", ["the drain's end", "a dead engine"])
async def test_a_call_that_goes_on_is_cut(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once where a worker can do nothing more: its coordinator must not wait for its draining."""
    monkeypatch.setattr(module, "FAREWELL_SECONDS", HANG if how == "a dead engine" else 0.1)
    async with serving(Slow()) as it:
        if how == "a dead engine":
            it.server.abandon()
        else:
            it.server.request_stop()
        with pytest.raises(grpc.aio.AioRpcError):
            await it.call.read()
    assert it.server.abandoned == (how == "a dead engine")


async def test_new_calls_are_refused_while_draining() -> None:
    """With UNAVAILABLE and our details, on the connection that is there; health goes on answering."""
    slow, draining, may_drain = Slow(), asyncio.Event(), asyncio.Event()

    async def drain() -> None:
        draining.set()
        await may_drain.wait()

    async with serving(slow, drain) as it:
        it.server.request_stop()
        await draining.wait()

        async def refused() -> None:
            with ends_with(grpc.StatusCode.UNAVAILABLE) as caught:
                await it.channel.unary_stream(METHOD)(b"").read()
            assert from_rpc_error(caught.value).message == "the test is stopping"
            assert caught.value.trailing_metadata()

        await refused()
        may_drain.set()
        for _ in range(20):
            await refused()
        answer = await health_pb2_grpc.HealthStub(it.channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        slow.may_end.set()
        assert await it.call.read() == b"goodbye"
        assert await it.call.read() is grpc.aio.EOF


@pytest.mark.parametrize("when", ["with its parent", "by itself"])
def test_a_child_may_end_with_its_parents_pipe(when: str) -> None:
    """The pipe closes however the supervisor ends."""
    with running(CHILD, when) as child:
        assert json.loads(child.stdout.readline())["event"] == "ready"
        child.stdin.close()
        if when == "by itself":
            # One that ended wrongly would have by then: nothing runs that it could wait for.
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(1.0)
            child.terminate()
        assert child.wait(HANG) == 0


@pytest.mark.parametrize("role", ["target", "coordinator"])
def test_a_loading_process_ends_with_its_parent(role: str) -> None:
    """Loading may take minutes, and loaded weights keep a device's memory."""
    with running(LOADING, role, "default_int_handler", "with its parent") as child:
        assert child.stdout.readline() == "loading\n"
        child.stdin.close()
        assert child.wait(HANG) == 1
