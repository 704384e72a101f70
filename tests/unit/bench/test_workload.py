"""Closed loops: requests of each client, and the measured window."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from paceline.bench.workload import LENGTH_SPREAD, Prompt, Workload, answer_lengths, run_load, workloads
from paceline.client import GenerationChunk, SamplingParams, SpeculationParams
from paceline.core.errors import UnavailableError

PROMPTS: list[Prompt] = [(1,), (2,), (3,), (4,), (5,)]


def test_one_client_runs_each_prompt_singly() -> None:
    assert [load.queues for load in workloads(PROMPTS, 1)] == [((prompt,),) for prompt in PROMPTS]


@pytest.mark.parametrize("concurrency", [2, 3, 5, 8, 64])
def test_clients_share_requests_and_prompts_evenly(concurrency: int) -> None:
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


@pytest.mark.parametrize("requests", [1, 4, 11])
def test_answer_lengths_vary_but_clients_work_equally(requests: int) -> None:
    lengths = [answer_lengths(64, client, requests) for client in range(32)]
    assert {sum(of_client) for of_client in lengths} == {64 * requests}
    assert {len(of_client) for of_client in lengths} == {requests}
    every = {length for of_client in lengths for length in of_client}
    if requests == 1:
        assert every == {64}
    else:
        assert len(every) > 20
        assert 64 * (1 - LENGTH_SPREAD) <= min(every) < 64 < max(every) <= 64 * (1 + LENGTH_SPREAD)
    assert lengths == [answer_lengths(64, client, requests) for client in range(32)]


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_every_answer_has_a_token(max_tokens: int) -> None:
    assert min(length for client in range(64) for length in answer_lengths(max_tokens, client, 4)) >= 1


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


async def test_tokens_count_until_the_first_client_is_done() -> None:
    outcome = await load(((1,), (1,)), ((4,), (4,)))
    # The fast client's 20 tokens, and what the slow one had by then: a quarter, up to a turn.
    assert outcome.window_tokens in range(24, 27)
    assert len(outcome.results) == 4
    assert outcome.decode_tokens_per_second is None


async def test_each_client_has_its_own_answer_lengths() -> None:
    client: Any = FakeClient()
    outcome = await run_load(
        client,
        Workload((((1,),) * 4, ((1,),) * 4)),
        SpeculationParams(),
        temperature=1.0,
        max_tokens=10,
        seed=100,
    )
    lengths = sorted((result.seed, result.max_tokens) for result in outcome.results)
    wanted = [answer_lengths(10, number, 4) for number in range(2)]
    assert lengths == [
        (100 + turn * 2 + number, wanted[number][turn]) for turn in range(4) for number in range(2)
    ]


async def test_seeds_differ_within_a_load_and_repeat_for_each_arm() -> None:
    first, second = [await load(((1,), (1,)), ((1,), (1,))) for _ in range(2)]
    seeds = [{result.seed for result in outcome.results} for outcome in (first, second)]
    assert seeds == [{100, 101, 102, 103}] * 2


async def test_a_single_request_reports_its_decode_rate() -> None:
    outcome = await load(((1,),))
    assert outcome.window_tokens == 10
    assert outcome.decode_tokens_per_second > 0


async def test_one_failing_request_ends_the_load() -> None:
    with pytest.raises(UnavailableError, match="the coordinator is gone"):
        await load(((1,),), ((101,),))
