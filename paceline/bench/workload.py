"""Closed-loop load: so many clients, each with its queue of prompts, the next request after the last."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.client import AsyncClient, GenerationResult, SamplingParams, SpeculationParams

Prompt = tuple[int, ...]

LENGTH_SPREAD = 0.5
"""Share of `max_tokens` by which answers of a client with several requests are longer or shorter, at most."""
_FEWEST_REQUESTS, _FEWEST_IN_ALL = 4, 32  # of each client, where there are several, and of all together


@dataclass(frozen=True, slots=True)
class Workload:
    """What one run does: every client's prompts, in order."""

    queues: tuple[tuple[Prompt, ...], ...]

    @property
    def concurrency(self) -> int:
        """Clients at a time."""
        return len(self.queues)


def workloads(prompts: Sequence[Prompt], concurrency: int) -> list[Workload]:
    """One workload a prompt for a single client; else one in which all clients do equally many requests.

    They are as many as it takes for every prompt to be used, at least four each and 32 together: the first
    ones begin in step, with all prompts at once, and a window of a second says little.
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
    """Tokens of each of a client's answers: up to LENGTH_SPREAD of `max_tokens` longer or shorter.

    Every longer one has one that is shorter by as much, in an order that differs from client to client: all
    have the same work, and end together. With answers of one length all clients march in step from the first
    token to the last and share every pass, as no users ever do.
    """
    chosen = random.Random(client)
    longer = [int(max_tokens * chosen.uniform(0, LENGTH_SPREAD)) for _ in range(requests // 2)]
    changes = [*longer, *(-more for more in longer), *[0] * (requests % 2)]
    chosen.shuffle(changes)
    return [max_tokens + change for change in changes]


@dataclass(slots=True)
class LoadResult:
    """One run. The window ends when the first client has nothing left to ask: until then all are busy."""

    window_tokens: int = 0
    window_seconds: float = 0.0
    client_cpu: float = 0.0
    """Processor time of this process over the window's time."""
    decode_tokens_per_second: float | None = None
    """Of a single request, from its first token on: the prompt's pass is left out. None for other loads."""
    results: list[GenerationResult] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Of all clients together."""
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
    """Run a workload to its end. Seeds follow from `seed` and a request's place, so all arms have the same.

    So do the lengths of the answers, `max_tokens` on average (`answer_lengths`).

    Raises PacelineError.
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
        raise failures.exceptions[0] from None  # one is enough, the others were cancelled for it
    return outcome
