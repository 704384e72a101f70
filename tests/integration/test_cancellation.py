"""A client that goes away: its sequences end on both workers within a round, and nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from harness.stacks import RunningStack
from harness.waiting import HANG

from paceline.client import AsyncClient, Client
from paceline.core.errors import CancelledError, DeadlineExceededError

LONG = {"max_tokens": 1500, "ignore_eos": True, "temperature": 1.0, "seed": 1}


def drop(stack: RunningStack) -> None:
    for _ in stack.client.stream("def main(", LONG, timeout=HANG):
        break  # the stream is dropped here


def close_midway(stack: RunningStack) -> None:
    # Left to choose, the coordinator may do without the draft.
    speculation = {"num_speculative_tokens": 4}
    with stack.client.stream("def main(", LONG, speculation=speculation, timeout=HANG) as stream:
        for chunk in stream:
            if chunk.index > 20:
                break
        held = [w.info.cache.sequences for w in stack.client.status().workers if w.info is not None]
        assert held == [1, 1]


def close_several_choices(stack: RunningStack) -> None:
    with stack.client.stream("x", {**LONG, "n": 5}, timeout=HANG) as stream:
        next(stream)


def close_the_channel(stack: RunningStack) -> None:
    client = Client(stack.address)
    streams = [client.stream("def main(", LONG, timeout=HANG) for _ in range(4)]
    for stream in streams:
        next(stream)
    client.close()
    for stream in streams:
        with pytest.raises(CancelledError):
            list(stream)


def pass_the_deadline(stack: RunningStack) -> None:
    with pytest.raises(DeadlineExceededError):
        stack.client.generate("def main(", LONG, timeout=0.3)


LEAVING = (drop, close_midway, close_several_choices, close_the_channel, pass_the_deadline)


@pytest.mark.parametrize("leave", LEAVING, ids=lambda leave: leave.__name__)
def test_a_client_that_leaves_frees_both_caches(
    stack: RunningStack, leave: Callable[[RunningStack], None]
) -> None:
    stack.good_request()
    finished = stack.num_finished()
    leave(stack)
    stack.check_cut_short(finished)


async def test_requests_cancelled_at_any_time_leave_nothing(stack: RunningStack) -> None:
    """Also before the first message, where nobody has begun to read yet."""
    finished = stack.num_finished()
    async with AsyncClient(stack.address) as client:

        async def start_and_leave(number: int) -> None:
            stream = client.stream("def main(", {**LONG, "seed": number}, timeout=HANG)
            task = asyncio.ensure_future(anext(stream))
            for _ in range(number % 12):
                await asyncio.sleep(0)
            if number % 3 == 0:
                await task
            task.cancel()
            await stream.aclose()
            await asyncio.gather(task, return_exceptions=True)

        for start in range(0, 96, 16):
            await asyncio.gather(*(start_and_leave(start + i) for i in range(16)))
        # A request that is accepted but whose answer nobody waits for.
        for number in range(40):
            await client.stream("x", {**LONG, "seed": number}, timeout=HANG).aclose()
    stack.check_cut_short(finished)


def test_a_cancelled_neighbour_changes_no_token(stack: RunningStack) -> None:
    parameters = {"max_tokens": 60, "temperature": 1.0, "seed": 9, "ignore_eos": True}
    finished = stack.num_finished() + 2
    alone = stack.client.generate("import os", parameters, timeout=HANG)
    neighbours = [stack.client.stream("def main(", LONG, timeout=HANG) for _ in range(6)]
    for neighbour in neighbours:
        next(neighbour)
    stream = stack.client.stream("import os", parameters, timeout=HANG)
    next(stream)
    for neighbour in neighbours:
        neighbour.close()
    for _ in stream:
        pass
    assert stream.result.token_ids == alone.token_ids
    # This one and that which was alone came to their ends.
    stack.check_cut_short(finished)
