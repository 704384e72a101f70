"""The end of a server process: draining, the end of the drain, and giving up at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import IO, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
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
    server.announce()
    await server.run_until_stopped(exit_with_parent=exit_with_parent, drain=drained)

asyncio.run(serve(sys.argv[1] == "with its parent"))
"""


LOADING = """
import sys, threading
from types import SimpleNamespace
from paceline.core.config import CoordinatorConfig, TargetConfig

def load(*words):
    print("loading", flush=True)
    threading.Event().wait()

if sys.argv[1] == "coordinator":
    from coordinator.text import vocabulary
    from coordinator import main
    vocabulary.load_tokenizer = load
    main.run(CoordinatorConfig(targets=("127.0.0.1:1",), tokenizer="m", exit_with_parent=True))
else:
    from paceline import worker_process
    role = SimpleNamespace(name="target", load=load)
    worker_process.run(role, TargetConfig(model="m", exit_with_parent=True))
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


async def serve(
    slow: Slow, drain: Callable[[], Awaitable[None]] = drained
) -> tuple[Server, asyncio.Task[None]]:
    server = Server("test", "127.0.0.1", 0)
    server.grpc.add_registered_method_handlers(
        "test.Test", {"Stream": grpc.unary_stream_rpc_method_handler(slow.stream)}
    )
    await server.start()
    return server, asyncio.create_task(server.run_until_stopped(exit_with_parent=False, drain=drain))


async def _set(event: asyncio.Event) -> None:
    await event.wait()


async def test_a_running_call_finishes_before_the_process_ends() -> None:
    slow = Slow()
    server, serving = await serve(slow, lambda: _set(slow.may_end))
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = channel.unary_stream(METHOD)(b"")
        assert await call.read() == b"hello"
        server.request_stop()
        await asyncio.sleep(0)
        slow.may_end.set()
        assert await call.read() == b"goodbye"
        assert await call.read() is grpc.aio.EOF
    await asyncio.wait_for(serving, HANG)


async def test_calls_longer_than_the_drain_end_with_an_error() -> None:
    slow = Slow()

    async def drain() -> None:
        slow.may_end.set()

    server, serving = await serve(slow, drain)
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = channel.unary_stream(METHOD)(b"")
        assert await call.read() == b"hello"
        server.request_stop()
        assert await call.read() == b"goodbye"
        await serving


async def test_calls_that_ignore_the_drains_end_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FAREWELL_SECONDS", 0.1)
    server, serving = await serve(Slow())
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = channel.unary_stream(METHOD)(b"")
        assert await call.read() == b"hello"
        server.request_stop()
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        await serving


async def test_new_calls_are_refused_while_draining() -> None:
    """With UNAVAILABLE and our details, on the connection that is there; health goes on answering."""
    slow, draining, may_drain = Slow(), asyncio.Event(), asyncio.Event()

    async def drain() -> None:
        draining.set()
        await may_drain.wait()

    server, serving = await serve(slow, drain)
    async with grpc.aio.insecure_channel(server.address) as channel:
        old = channel.unary_stream(METHOD)(b"")
        assert await old.read() == b"hello"
        server.request_stop()
        await draining.wait()

        async def refused() -> None:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_stream(METHOD)(b"").read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert from_rpc_error(caught.value).message == "the test is stopping"
            assert caught.value.trailing_metadata()

        await refused()
        may_drain.set()
        for _ in range(20):
            await refused()
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        slow.may_end.set()
        assert await old.read() == b"goodbye"
        assert await old.read() is grpc.aio.EOF
        await asyncio.wait_for(serving, HANG)


async def test_a_worker_with_a_dead_engine_hangs_up_at_once() -> None:
    """Its coordinator must not wait for the draining of a worker that can do nothing."""
    server, serving = await serve(Slow())
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = channel.unary_stream(METHOD)(b"")
        assert await call.read() == b"hello"
        server.abandon()
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        await asyncio.wait_for(serving, HANG)
    assert server.abandoned


@contextlib.contextmanager
def piped(program: str, how: str) -> Iterator[tuple[subprocess.Popen[str], IO[str], IO[str]]]:
    """A process with its standard input and output, gone when the block ends."""
    command = [sys.executable, "-P", "-c", program, how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdin
            assert child.stdout
            yield child, child.stdin, child.stdout
        finally:
            child.kill()


@pytest.mark.parametrize("when", ["with its parent", "by itself"])
def test_a_child_may_end_with_its_parents_pipe(when: str) -> None:
    """The pipe closes however the supervisor ends."""
    with piped(CHILD, when) as (child, pipe, output):
        assert json.loads(output.readline())["event"] == "ready"
        pipe.close()
        if when == "by itself":
            # One that ended wrongly would have by then: nothing runs that it could wait for.
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(1.0)
            child.terminate()
        assert child.wait(HANG) == 0


@pytest.mark.parametrize("how", ["worker", "coordinator"])
def test_a_loading_process_ends_with_its_parent(how: str) -> None:
    """Loading may take minutes, and loaded weights keep a device's memory."""
    with piped(LOADING, how) as (child, pipe, output):
        assert output.readline() == "loading\n"
        pipe.close()
        assert child.wait(HANG) == 1
