"""Tasks, event loops and cancellation with the asyncio client."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from paceline import AsyncClient
from paceline.client.resuming import ResumeBackoff
from paceline.core.errors import CancelledError, DeadlineExceededError, InternalError, UnavailableError

WAIT = 30
DEADLINES = (0.3, 3.0, float(WAIT))
"""A busy machine may take longer than the first to begin a call."""


async def ended(server: Any) -> bool:
    """Whether the server saw the call end, without blocking the event loop."""
    return await asyncio.to_thread(server.ended.wait, WAIT)


async def test_many_generations_share_one_client(server: Any) -> None:
    async with AsyncClient(server.address) as client:
        results = await asyncio.gather(*(client.generate("x") for _ in range(16)))
    assert {result.text for result in results} == {"Hello!"}


@pytest.mark.usefixtures("no_gc")
async def test_breaking_out_cancels_at_once(server: Any, messages: Any) -> None:
    server.play_and_block(*messages.good[:2])
    async with AsyncClient(server.address) as client:
        async for chunk in client.stream("x"):
            assert chunk.text == "He"
            break
        assert await ended(server)


async def test_a_stream_is_a_context_manager(server: Any, messages: Any) -> None:
    server.play_and_block(*messages.good[:2])
    async with AsyncClient(server.address) as client:
        async with client.stream("x") as stream:
            assert (await anext(stream)).text == "He"
        assert await ended(server)
        async with contextlib.aclosing(client.stream("x")) as stream:
            assert (await anext(stream)).text == "He"


@pytest.mark.parametrize("kind", ["generate", "stream"])
async def test_cancelling_the_task_cancels_the_call(server: Any, messages: Any, kind: str) -> None:
    server.play_and_block(*messages.good[:2])

    async with AsyncClient(server.address) as client:

        async def read() -> None:
            if kind == "generate":
                await client.generate("x")
            async for _ in client.stream("x"):
                pass

        task = asyncio.create_task(read())
        assert await asyncio.to_thread(server.blocked.wait, WAIT)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        assert await ended(server)


@pytest.mark.usefixtures("no_gc")
async def test_a_kept_error_does_not_keep_its_stream(server: Any, messages: Any) -> None:
    """Its traceback must not hold the stream."""
    server.play_and_block(*messages.good[:2])
    async with AsyncClient(server.address) as client:
        kept = []
        try:
            async with asyncio.timeout(None) as limit:
                async for _ in client.stream("x"):
                    limit.reschedule(asyncio.get_running_loop().time())
        except TimeoutError as error:
            kept.append(error)
            assert await ended(server), "while the error is there"
        assert kept


async def test_asyncio_timeout_raises_a_timeout(server: Any, messages: Any) -> None:
    server.play_and_block(*messages.good[:2])
    async with AsyncClient(server.address) as client:

        async def time_out_once_begun() -> None:
            async with asyncio.timeout(None) as limit:
                call = asyncio.create_task(client.generate("x"))
                assert await asyncio.to_thread(server.blocked.wait, WAIT)
                limit.reschedule(asyncio.get_running_loop().time())
                await call

        with pytest.raises(TimeoutError):
            await time_out_once_begun()
        assert await ended(server)


async def test_a_deadline_ends_a_stream_midway(server: Any, messages: Any) -> None:
    server.play_and_block(*messages.good[:2])
    async with AsyncClient(server.address) as client:
        seen: list[str] = []

        async def read(seconds: float) -> None:
            async for chunk in client.stream("x", timeout=seconds):
                seen.append(chunk.text)

        for timeout in DEADLINES:
            with pytest.raises(DeadlineExceededError):
                await read(timeout)
            if seen:
                break
        assert seen == ["He"]


async def test_closing_from_another_task_does_not_cancel_it(server: Any, messages: Any) -> None:
    server.play_and_block(*messages.good[:2])
    async with AsyncClient(server.address) as client:
        stream = client.stream("x")
        assert (await anext(stream)).text == "He"
        waiting = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await stream.aclose()
        with pytest.raises(CancelledError):
            await waiting
        assert not waiting.cancelled()


async def test_an_unused_client_closes(server: Any) -> None:
    client = AsyncClient(server.address)
    await client.close()
    with pytest.raises(UnavailableError, match="closed"):
        await client.status()


def test_a_call_without_an_event_loop_leaves_the_client_usable(server: Any) -> None:
    """The connection must belong to the loop of the first successful call."""
    client = AsyncClient(server.address)
    with pytest.raises(RuntimeError, match="no running event loop"):
        client.stream("x")

    async def main() -> str:
        async with client:
            return (await client.generate("x")).text

    assert asyncio.run(main()) == "Hello!"


# ---- waits that are given up ---------------------------------------------------------------------------


async def give_up(stream: Any, times: int = 1) -> None:
    for _ in range(times):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)


def pausing_after(server: Any, messages: Any, before: int) -> None:
    """The good answer, of which all but the first `before` messages are sent when the test says so."""

    def script(_request: Any, _context: Any) -> Iterator[Any]:
        yield from messages.good[:before]
        server.blocked.set()
        server.release.wait()
        yield from messages.good[before:]

    server.script = script


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("resumes", [0, 5])
async def test_a_cancelled_read_loses_nothing(server: Any, messages: Any, before: int, resumes: int) -> None:
    """A cancelled wait is not a broken stream, also before the first message."""
    pausing_after(server, messages, before)
    async with AsyncClient(server.address, resume_seconds=resumes) as client:
        stream = client.stream("x")
        texts = [(await anext(stream)).text] if before == 2 else []
        await give_up(stream, 8)
        server.release.set()
        texts += [chunk.text async for chunk in stream]
        assert texts == ["He", "", "llo", "!"]
        assert (stream.num_resumes, len(server.requests)) == (0, 1)


async def test_reads_cancelled_at_any_time_lose_nothing(server: Any, messages: Any) -> None:
    count = 300
    chunks = [messages.chunk(i, [i], "a", [messages.target]) for i in range(count)]
    server.play(messages.started(), *chunks, messages.finished(count))
    async with AsyncClient(server.address) as client:
        stream, indices, given_up = client.stream("x"), [], 0
        while stream.result is None:
            wait = asyncio.create_task(stream.__anext__())
            for _ in range(len(indices) % 7):
                await asyncio.sleep(0)
            wait.cancel()
            try:
                indices.append((await wait).index)
            except asyncio.CancelledError:
                given_up += 1
                if given_up % 3 == 0:
                    indices.append((await anext(stream)).index)
    assert indices == list(range(count + 1))
    assert given_up > count / 10
    assert stream.num_resumes == 0


async def test_a_read_cancelled_in_a_pause_costs_no_resume(server: Any, messages: Any) -> None:
    server.play(*messages.good[:2])
    async with AsyncClient(server.address) as client:
        client._backoff = ResumeBackoff(first=0.2, uniform=lambda: 0.0)
        stream = client.stream("x")
        assert (await anext(stream)).text == "He"
        await give_up(stream, 8)
        assert stream.num_resumes == 0, "nothing was asked for again yet"
        server.play(messages.good[0], *messages.good[2:])
        assert [chunk.text async for chunk in stream] == ["", "llo", "!"]
        assert (stream.num_resumes, len(server.requests)) == (1, 2)


async def test_only_one_task_reads_a_stream(server: Any, messages: Any) -> None:
    server.play_and_block(*messages.good[:2])
    async with AsyncClient(server.address) as client:
        stream = client.stream("x")
        assert (await anext(stream)).text == "He"
        waiting = asyncio.create_task(stream.__anext__())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another task"):
            await anext(stream)
        await stream.aclose()
        with pytest.raises(CancelledError):
            await waiting


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("given_up", [False, True])
@pytest.mark.parametrize("cut", [False, True])
async def test_a_stream_is_freed_as_soon_as_it_is_dropped(
    server: Any, messages: Any, given_up: bool, cut: bool
) -> None:
    """The task that waits for a message must not refer to the stream."""

    def script(request: Any, context: Any) -> Iterator[Any]:
        yield from messages.good[:2] if not request.resume_from else (messages.good[0], messages.good[2])
        if cut and not request.resume_from:
            messages.abort(context, UnavailableError("for example"))
        server.release.wait()

    server.script = script
    async with AsyncClient(server.address) as client:
        client._backoff = ResumeBackoff(first=0.0)
        stream = client.stream("x")
        assert (await anext(stream)).text == "He"
        if cut:
            assert (await anext(stream)).token_ids == (12, 13)
        if given_up:
            await give_up(stream)
        dropped = weakref.ref(stream)
        del stream
        assert dropped() is None
        assert await ended(server)


async def test_an_unread_calls_end_is_no_unhandled_error(server: Any, messages: Any) -> None:
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context))

    def script(_request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        yield from messages.good[:2]
        server.release.wait()
        messages.abort(context, InternalError("for example"))

    server.script = script
    async with AsyncClient(server.address) as client:
        stream = client.stream("x")
        assert (await anext(stream)).text == "He"
        await give_up(stream)
        server.release.set()
        assert await ended(server)
        await asyncio.sleep(0.1)
        del stream
        gc.collect()
        await asyncio.sleep(0)
    assert told == []


@pytest.mark.parametrize("ends_its_tasks", [True, False])
def test_a_stream_outliving_its_loop_is_dropped_silently(
    server: Any, messages: Any, ends_its_tasks: bool
) -> None:
    server.play_and_block(*messages.good[:2])

    async def main() -> Any:
        stream = AsyncClient(server.address).stream("x")
        assert (await anext(stream)).text == "He"
        await give_up(stream)
        return stream

    if ends_its_tasks:
        stream = asyncio.run(main())
    else:
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda _loop, _context: None)  # it says itself that it has not
        stream = loop.run_until_complete(main())
        loop.close()
    del stream
    gc.collect()


# ---- closing the client --------------------------------------------------------------------------------


class Slow:
    """A queue into which nothing is put before the test is over."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.begun = threading.Event()

    def put(self, _name: str) -> None:
        self.begun.set()
        self.server.release.wait()


async def slowly_closing(server: Any, messages: Any) -> tuple[AsyncClient, Any, asyncio.Task[None]]:
    """A client with a stream, its channel, and the task that closes it and waits for the server."""
    server.play_and_block(*messages.good[:2])
    server.cancelled = Slow(server)
    client = AsyncClient(server.address)
    stream = client.stream("x")
    assert (await anext(stream)).text == "He"
    channel = stream._link.channel
    closing = asyncio.create_task(client.close())
    assert await asyncio.to_thread(server.cancelled.begun.wait, WAIT)
    return client, channel, closing


async def test_a_closing_client_begins_nothing(server: Any, messages: Any) -> None:
    """A request begun during the close would be held for nobody."""
    client, _, closing = await slowly_closing(server, messages)
    with pytest.raises(UnavailableError, match="closed"):
        client.stream("x")
    with pytest.raises(UnavailableError, match="closed"):
        await client.status()
    assert not closing.done()
    server.release.set()
    await closing
    assert len(server.requests) == 1


async def test_a_cancelled_close_still_closes_the_connection(server: Any, messages: Any) -> None:
    client, channel, closing = await slowly_closing(server, messages)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
    await client.close()
