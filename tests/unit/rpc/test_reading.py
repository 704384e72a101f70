"""Unfinished messages: their senders get an error, and no other call waits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from paceline.core import limits
from paceline.core.errors import DeadlineExceededError, InvalidArgumentError, ResourceExhaustedError
from paceline.rpc.server import reading as module
from paceline.rpc.server.reading import MAX_OPEN_REQUEST_BYTES, UnfinishedMessages
from paceline.rpc.server.server import Server
from tests.unit.rpc.raw_http2 import Connection, connect
from tests.unit.rpc.serving import HANG, health
from tests.unit.rpc.test_ports import bounded

CHECK = b"/grpc.health.v1.Health/Check"
RESOURCE_EXHAUSTED, DEADLINE_EXCEEDED = b"grpc-status\x018", b"grpc-status\x014"
SAID = limits.MAX_CLIENT_MESSAGE_BYTES


@contextlib.asynccontextmanager
async def raw(server: Server) -> AsyncIterator[Connection]:
    connection = await connect(server.address)
    try:
        yield connection
    finally:
        await connection.close()


@pytest.mark.parametrize("method", [b"Check", b"Watch"])
async def test_an_unfinished_message_times_out(method: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OPEN_SECONDS", 0.05)
    async with bounded() as server, raw(server) as connection:
        stream = await connection.half(b"/grpc.health.v1.Health/" + method, SAID, 1000)
        assert DEADLINE_EXCEEDED in await connection.end_of(stream)


async def test_unfinished_messages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those above the bound are dropped; whole messages are answered meanwhile. gRPC need not hand over
    calls of one connection in order, so which ones is not asserted."""
    monkeypatch.setattr(module, "OPEN_SECONDS", HANG)  # a slow machine may take long to send them
    async with bounded() as server, raw(server) as connection:
        most = module.UNFINISHED_BYTES // limits.MAX_CLIENT_MESSAGE_BYTES
        for _ in range(most + 4):
            await connection.half(CHECK, SAID, 1000)
        given_up = await connection.ends(4)
        assert all(b"too many requests" in end for end in given_up)
        async with health(server) as other:
            await other.check()
        assert len(connection.ended) <= 5  # the check took a place as well


async def test_the_oldest_unfinished_message_is_dropped() -> None:
    reading, calls = UnfinishedMessages(2, HANG, lambda: 10), Calls()
    tasks = [await begun(reading, calls) for _ in range(3)]
    with pytest.raises(ResourceExhaustedError):
        await tasks[0]
    for message in calls.messages[1:]:
        message.set_result(b"whole")
    assert [await task for task in tasks[1:]] == [b"whole"] * 2


async def test_an_unauthenticated_method_accepts_small_messages() -> None:
    async with bounded() as server, health(server) as client:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await client.check("x" * MAX_OPEN_REQUEST_BYTES)
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"at most {MAX_OPEN_REQUEST_BYTES} bytes" in (failure.value.details() or "")


async def test_a_call_without_a_message_is_refused() -> None:
    async with bounded() as server, grpc.aio.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await channel.stream_unary(CHECK.decode())(iter(()), timeout=HANG)
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_message_above_the_ports_bound_is_refused() -> None:
    async with bounded() as server, raw(server) as connection:
        stream = await connection.half(CHECK, SAID + 1, 1000)
        assert RESOURCE_EXHAUSTED in await connection.end_of(stream)


async def test_an_unread_call_holds_at_most_64_kib() -> None:
    async with bounded() as server, raw(server) as connection:
        assert (await connection.end_of(await connection.half(b"/a/b", SAID))) != b""
        assert connection._initial == 65_535


async def test_watchers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_HEALTH_WATCHERS", 2)
    async with bounded() as server, health(server) as client:
        watches = [client.watch() for _ in range(2)]
        for watch in watches:
            await watch.read()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await client.watch().read()
        assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for watch in watches:
            watch.cancel()
        while server._health._num_watchers:  # noqa: ASYNC110
            await asyncio.sleep(0)
        again = client.watch()
        await again.read()
        again.cancel()


class Calls:
    """Contexts whose messages come when a test says so."""

    def __init__(self) -> None:
        self.messages: list[asyncio.Future[Any]] = []

    async def read(self) -> Any:
        message = asyncio.get_running_loop().create_future()
        self.messages.append(message)
        return await message


async def begun(reading: UnfinishedMessages, calls: Any) -> asyncio.Task[bytes]:
    before = len(calls.messages)
    task = asyncio.create_task(reading.one(calls))
    while len(calls.messages) == before:  # noqa: ASYNC110
        await asyncio.sleep(0)
    return task


async def test_a_dropped_message_may_already_be_whole() -> None:
    reading, calls = UnfinishedMessages(1, HANG, lambda: 10), Calls()
    first = await begun(reading, calls)
    second = await begun(reading, calls)
    for message in calls.messages:
        message.set_result(b"whole")
    assert [await first, await second] == [b"whole"] * 2
    assert not reading._unfinished


async def test_each_end_of_a_message_frees_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAST_SECONDS", 0.0)
    reading, calls = UnfinishedMessages(1, 0.05, lambda: 4), Calls()
    first = await begun(reading, calls)
    second = await begun(reading, calls)
    with pytest.raises(ResourceExhaustedError):
        await first
    with pytest.raises(DeadlineExceededError):
        await second
    third = await begun(reading, calls)
    third.cancel()
    with pytest.raises(asyncio.CancelledError):
        await third
    fourth = await begun(reading, calls)
    calls.messages[-1].set_result(b"large")
    with pytest.raises(InvalidArgumentError):
        await fourth
    assert not reading._unfinished
    assert len(reading._reads) == 3  # until their calls end
    for message in calls.messages[:-1]:
        message.set_exception(grpc.aio.UsageError("over"))
    while reading._reads:  # noqa: ASYNC110
        await asyncio.sleep(0)
