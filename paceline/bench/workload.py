"""Closed-loop load: a number of clients, each sending its queue of prompts one after the other."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.client import AsyncClient, GenerationResult, SamplingParams, SpeculationParams

Prompt = tuple[int, ...]

LENGTH_SPREAD = 0.5
"""Largest share of `max_tokens` by which answer lengths of a client with several requests vary."""
_FEWEST_REQUESTS, _FEWEST_IN_ALL = 4, 32  # requests per client if there are several clients, and in total


@dataclass(frozen=True, slots=True)
class Workload:
    """The prompts of every client in one run, in order."""

    queues: tuple[tuple[Prompt, ...], ...]

    @property
    def concurrency(self) -> int:
        """Number of clients."""
        return len(self.queues)


def workloads(prompts: Sequence[Prompt], concurrency: int) -> list[Workload]:
    """For a single client one workload per prompt, else one workload with equally many requests per client.

    The number is large enough to use every prompt, and at least 4 per client and 32 in total: the first
    requests start simultaneously, and a window of one second would measure little else.
    """
    if concurrency == 1:
        return [Workload(((prompt,),)) for prompt in prompts]
    each = max(_FEWEST_REQUESTS, -(-max(_FEWEST_IN_ALL, len(prompts)) // concurrency))
    queues = [
        tuple(prompts[(client + turn * concurrency) % len(prompts)] for turn in range(each))
        for client in range(concurrency)
    ]
    return [Workload(tuple(queues))]


def answer_lengths(max_tokens: int, client: int, requests: int) -> list[int]:
    """Tokens of each answer of a client, varied by up to LENGTH_SPREAD of `max_tokens`.

    Every longer answer has a counterpart that is shorter by as much, in a different order for each client, so
    all clients have the same amount of work. With equal lengths, all clients would run in lockstep and share
    every pass, which is unrealistic.
    """
    chosen = random.Random(client)
    longer = [int(max_tokens * chosen.uniform(0, LENGTH_SPREAD)) for _ in range(requests // 2)]
    changes = [*longer, *(-more for more in longer), *[0] * (requests % 2)]
    chosen.shuffle(changes)
    return [max_tokens + change for change in changes]


@dataclass(slots=True)
class LoadResult:
    """The result of one run. The window ends when the first client finishes; until then all are busy."""

    window_tokens: int = 0
    window_seconds: float = 0.0
    client_cpu: float = 0.0
    """CPU time of this process over the window's time."""
    decode_tokens_per_second: float | None = None
    """Rate of a single request after its first token, which excludes prefill. None for other loads."""
    results: list[GenerationResult] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Rate of all clients together."""
        return self.window_tokens / self.window_seconds


async def run_load(
    client: AsyncClient,
    workload: Workload,
    speculation: SpeculationParams,
    *,
    temperature: float,
    max_tokens: int,
    seed: int,
) -> LoadResult:
    """Run a workload to its end. Raises PacelineError.

    Seeds and answer lengths (`answer_lengths`) depend only on `seed` and the request's place, so all arms
    have the same.
    """
    outcome = LoadResult()
    arrived = 0
    alone = sum(map(len, workload.queues)) == 1
    cpu, begun = time.process_time(), time.perf_counter()

    async def one_client(number: int, queue: Sequence[Prompt]) -> None:
        nonlocal arrived
        lengths = answer_lengths(max_tokens, number, len(queue))
        for turn, (prompt, length) in enumerate(zip(queue, lengths, strict=True)):
            sampling = SamplingParams(
                temperature=temperature,
                max_tokens=length,
                seed=seed + turn * workload.concurrency + number,
                ignore_eos=True,
            )
            stream = client.stream(prompt, sampling, speculation=speculation)
            first: tuple[int, float] | None = None
            async for chunk in stream:
                arrived += len(chunk.token_ids)
                first = first or (arrived, time.perf_counter())
            assert stream.result is not None
            outcome.results.append(stream.result)
            if alone and first is not None and arrived > first[0]:
                outcome.decode_tokens_per_second = (arrived - first[0]) / (time.perf_counter() - first[1])
        if not outcome.window_tokens:
            outcome.window_tokens = arrived
            outcome.window_seconds = time.perf_counter() - begun
            outcome.client_cpu = (time.process_time() - cpu) / outcome.window_seconds

    try:
        async with asyncio.TaskGroup() as group:
            for number, queue in enumerate(workload.queues):
                group.create_task(one_client(number, queue))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None  # the other tasks were cancelled because of it
    return outcome
