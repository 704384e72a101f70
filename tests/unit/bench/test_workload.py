"""Closed loops: who asks for what, and until when it counts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from paceline.bench.workload import Prompt, Workload, run_load, workloads
from paceline.client import GenerationChunk, SamplingParams, SpeculationParams
from paceline.core.errors import UnavailableError

PROMPTS: list[Prompt] = [(1,), (2,), (3,), (4,), (5,)]


def test_one_client_runs_each_prompt_singly() -> None:
    assert [load.queues for load in workloads(PROMPTS, 1)] == [((prompt,),) for prompt in PROMPTS]


@pytest.mark.parametrize("concurrency", [2, 3, 5, 8, 64])
def test_clients_do_equally_many_requests_and_use_every_prompt(concurrency: int) -> None:
    (load,) = workloads(PROMPTS, concurrency)
    assert load.concurrency == concurrency
    assert len({len(queue) for queue in load.queues}) == 1
    used = Counter(prompt for queue in load.queues for prompt in queue)
    assert set(used) == set(PROMPTS)
    assert max(used.values()) - min(used.values()) <= 1


@pytest.mark.parametrize(("concurrency", "each"), [(2, 16), (3, 11), (8, 4), (64, 4)])
def test_few_clients_do_more_requests_each(concurrency: int, each: int) -> None:
    (load,) = workloads(PROMPTS, concurrency)
    assert len(load.queues[0]) == each


class FakeStream:
    """One token a chunk. The prompt says how many turns of the loop each token takes."""

    def __init__(self, prompt: Prompt, sampling: SamplingParams) -> None:
        self.turns, self.sampling = prompt[0], sampling
        self.result: object | None = None

    async def __aiter__(self) -> AsyncIterator[GenerationChunk]:
        assert self.sampling.max_tokens is not None
        for index in range(self.sampling.max_tokens):
            for _ in range(self.turns):
                await asyncio.sleep(0)
            if self.turns > 100:
                raise UnavailableError("the coordinator is gone")
            yield GenerationChunk(index, (7,), "", ())
        self.result = self.sampling


class FakeClient:
    def stream(self, prompt: Prompt, sampling: SamplingParams, *, speculation: object) -> FakeStream:
        return FakeStream(prompt, sampling)


async def load(*queues: tuple[Prompt, ...]) -> Any:
    client: Any = FakeClient()
    return await run_load(
        client, Workload(queues), SpeculationParams(), temperature=1.0, max_tokens=10, seed=100
    )


async def test_tokens_count_until_the_first_client_has_nothing_left_to_ask() -> None:
    outcome = await load(((1,), (1,)), ((4,), (4,)))
    # The fast client's 20 tokens, and what the slow one had by then: a quarter, up to a turn.
    assert outcome.window_tokens in range(24, 27)
    assert len(outcome.results) == 4
    assert outcome.decode_tokens_per_second is None


async def test_seeds_differ_within_a_load_and_are_the_same_for_every_arm() -> None:
    first, second = [await load(((1,), (1,)), ((1,), (1,))) for _ in range(2)]
    seeds = [{result.seed for result in outcome.results} for outcome in (first, second)]
    assert seeds == [{100, 101, 102, 103}] * 2


async def test_a_single_request_tells_its_rate_after_the_first_token() -> None:
    outcome = await load(((1,),))
    assert outcome.window_tokens == 10
    assert outcome.decode_tokens_per_second > 0


async def test_one_failing_request_ends_the_load_with_its_error() -> None:
    with pytest.raises(UnavailableError, match="the coordinator is gone"):
        await load(((1,),), ((101,),))
