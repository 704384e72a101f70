"""The end of a coordinator: requests may finish during the drain, then they are ended."""

from __future__ import annotations

import asyncio
import math

import pytest

from coordinator.app import Coordinator
from paceline.core.errors import UnavailableError
from tests.unit.coordinator.machines import make_call

SECONDS = 30.0


@pytest.mark.parametrize("received", [(5, 6, 7), ()], ids=["in the middle", "at the start"])
async def test_a_request_outlasting_the_drain_gets_its_last_index(
    served: Coordinator, received: tuple[int, ...]
) -> None:
    async with asyncio.timeout(SECONDS):
        async with served.generating(
            make_call(received=received or None, resumable=True), math.inf
        ) as generation:
            parts = served.parts(generation)
            reading = asyncio.create_task(anext(parts))
            draining = asyncio.create_task(served.drain(0.1))
            with pytest.raises(UnavailableError, match="stopping") as told:
                await reading
            assert told.value.last_index == (len(received) - 1 if received else None)
        await draining
    assert len(served.requests) == 0
    assert served.dispatcher.running == 0


async def test_a_new_request_is_refused_while_draining(served: Coordinator) -> None:
    async with asyncio.timeout(SECONDS):
        await served.drain(0.0)
        with pytest.raises(UnavailableError, match="stopping"):
            async with served.generating(make_call(), math.inf):
                pass


async def test_draining_ends_when_nothing_runs(served: Coordinator) -> None:
    """It does not wait for the drain timeout."""
    async with asyncio.timeout(SECONDS):
        async with served.generating(make_call(), math.inf) as generation:
            draining = asyncio.create_task(served.drain(10 * SECONDS))
            await asyncio.sleep(0)
            for running in generation.choices:
                served.dispatcher.cancel(running)
        await draining
