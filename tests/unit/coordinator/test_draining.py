"""The end of a coordinator: what runs may end by itself for a while, then it is told."""

from __future__ import annotations

import asyncio
import math

import pytest

from coordinator.coordinator import Coordinator
from coordinator.links import LinkState
from coordinator.vocabulary import Vocabulary
from paceline.core.config import CoordinatorConfig
from paceline.core.errors import UnavailableError
from paceline.core.types import SamplingParams, SpeculationParams
from paceline.rpc.codec import GenerateCall, Resumption
from paceline.v1 import common_pb2

SECONDS = 30.0


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.load("embedded:target")


@pytest.fixture
async def coordinator(vocabulary: Vocabulary) -> Coordinator:
    """Its target was there, and is away for now: no request comes to an end."""
    config = CoordinatorConfig(targets=("a:1",), tokenizer="embedded:target")
    coordinator = Coordinator(config, vocabulary)
    link = coordinator.dispatcher.targets[0]
    link.known = link.admitted = common_pb2.WorkerInfo(
        model="m", max_model_len=100, vocabulary_size=vocabulary.size, eos_token_ids=[0]
    )
    link.state = LinkState.LOST
    coordinator._target_found.set()
    return coordinator


def call(*received: int) -> GenerateCall:
    """Goes on after `received`, or begins."""
    resumption = Resumption((len(received),), (received,)) if received else None
    sampling = SamplingParams(max_tokens=50, seed=1)
    return GenerateCall("r", (5, 6), sampling, SpeculationParams(), resumable=True, resumption=resumption)


@pytest.mark.parametrize("received", [(5, 6, 7), ()], ids=["in the middle", "at the start"])
async def test_what_outlasts_the_draining_is_told_its_last_index(
    coordinator: Coordinator, received: tuple[int, ...]
) -> None:
    async with asyncio.timeout(SECONDS):
        async with coordinator.generating(call(*received), math.inf) as generation:
            parts = coordinator.parts(generation)
            reading = asyncio.create_task(anext(parts))
            draining = asyncio.create_task(coordinator.drain(0.1))
            with pytest.raises(UnavailableError, match="stopping") as told:
                await reading
            assert told.value.last_index == (len(received) - 1 if received else None)
        await draining
    assert len(coordinator.requests) == 0
    assert coordinator.dispatcher.running == 0


async def test_a_new_request_is_refused_while_it_drains(coordinator: Coordinator) -> None:
    async with asyncio.timeout(SECONDS):
        await coordinator.drain(0.0)
        with pytest.raises(UnavailableError, match="stopping"):
            async with coordinator.generating(call(), math.inf):
                pass


async def test_draining_is_over_when_nothing_runs(coordinator: Coordinator) -> None:
    """Not only when its time is."""
    async with asyncio.timeout(SECONDS):
        async with coordinator.generating(call(), math.inf) as generation:
            draining = asyncio.create_task(coordinator.drain(10 * SECONDS))
            await asyncio.sleep(0)
            for running in generation.choices:
                coordinator.dispatcher.cancel(running)
        await draining
