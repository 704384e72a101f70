"""What only the asyncio client can get wrong: tasks, loops and their cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import Any

import pytest

from paceline import AsyncClient
from paceline.core.errors import CancelledError, DeadlineExceededError, UnavailableError

WAIT = 30
DEADLINES = (0.3, 3.0, float(WAIT))
"""A busy machine may take longer than the first to begin a call."""


async def ended(server: Any) -> bool:
    """Whether the server saw the call end, without blocking the event loop."""
    return await asyncio.to_thread(server.ended.wait, WAIT)


async def test_generate_and_stream(server: Any) -> None:
    async with AsyncClient(server.address) as client:
        assert (await client.generate("x")).text == "Hello!"
        assert [chunk.text async for chunk in client.stream("x")] == ["He", "", "llo", "!"]


async def test_many_generations_share_one_client(server: Any) -> None:
    async with AsyncClient(server.address) as client:
        results = await asyncio.gather(*(client.generate("x") for _ in range(16)))
    assert {result.text for result in results} == {"Hello!"}


async def test_breaking_out_cancels_at_once(server: Any, messages: Any) -> None:
    server.play_and_block(*messages.good[:2])
    gc.disable()
    try:
        async with AsyncClient(server.address) as client:
            async for chunk in client.stream("x"):
                assert chunk.text == "He"
                break
            assert await ended(server)
    finally:
        gc.enable()


async def test_a_stream_is_a_context(server: Any, messages: Any) -> None:
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


async def test_asyncio_timeout_stays_a_timeout(server: Any, messages: Any) -> None:
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


async def test_a_deadline_in_mid_stream(server: Any, messages: Any) -> None:
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


async def test_closing_from_another_task_is_not_a_task_cancellation(server: Any, messages: Any) -> None:
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


async def test_a_client_that_was_never_used_closes(server: Any) -> None:
    client = AsyncClient(server.address)
    await client.close()
    with pytest.raises(UnavailableError, match="closed"):
        await client.status()


def test_it_may_be_made_outside_of_any_event_loop(server: Any) -> None:
    client = AsyncClient(server.address)

    async def main() -> str:
        async with client:
            return (await client.generate("x")).text

    assert asyncio.run(main()) == "Hello!"
