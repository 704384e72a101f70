"""Sends what is planned and notes what comes. Times are read here, and nowhere above."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Protocol

from paceline.client.requests import Prompt
from paceline.client.results import GenerationChunk, GenerationResult
from paceline.core.clock import Clock, monotonic
from paceline.core.errors import PacelineError, ResourceExhaustedError
from paceline.core.types import SamplingParams, SpeculationParams
from paceline.loadtest.outcomes import Answer, Outcome
from paceline.loadtest.plan import Ask

FAILURE_PAUSE = 1.0
"""Seconds a client of a closed loop waits after a failure: else a server that is down would be asked by it
as fast as a processor can, and the test be over before the server is back."""


class Stream(Protocol):
    """What a load needs of `AsyncGenerationStream`."""

    @property
    def result(self) -> GenerationResult | None:
        """The whole generation, once the last chunk has come."""

    @property
    def num_resumes(self) -> int:
        """How often it was asked for again."""

    def __aiter__(self) -> AsyncIterator[GenerationChunk]: ...


class Sender(Protocol):
    """What a load needs of `AsyncClient`."""

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        speculation: SpeculationParams,
        cache_salt: str | None = None,
        timeout: float | None = None,
    ) -> Stream:
        """Begin a generation."""


class Load:
    """One load, sent once."""

    def __init__(
        self,
        client: Sender,
        speculation: SpeculationParams,
        *,
        cache_salt: Callable[[int], str],
        timeout: float | None,
        keep_tokens: bool,
        stopped: asyncio.Event,
        progress: Callable[[Load], None],
        clock: Clock = monotonic,
    ) -> None:
        """`cache_salt` gives a request's by its number. Outcomes have the tokens if they are to be kept. Once
        `stopped` is set no request begins. `progress` is called whenever one begins or ends."""
        self._client = client
        self._speculation = speculation
        self._cache_salt = cache_salt
        self._timeout = timeout
        self._keep_tokens = keep_tokens
        self._progress = progress
        self._clock = clock
        self._begun = clock()
        self._stopped = stopped
        self.outcomes: list[Outcome] = []
        self.running = 0
        self.failed = 0

    @property
    def seconds(self) -> float:
        """Since the start."""
        return self._clock() - self._begun

    async def closed(self, asks: Iterator[Ask], places: int, duration: float | None) -> None:
        """`places` clients, each of which sends the next request when its last one has ended."""

        async def one_client() -> None:
            for ask in asks:
                if self._over(duration):
                    return
                outcome = await self.send(ask)
                if outcome.error:
                    await self._stopped_within(_pause_after(outcome.error))

        async with asyncio.TaskGroup() as group:
            for _ in range(places):
                group.create_task(one_client())

    async def open(self, asks: Iterator[Ask], places: int | None) -> None:
        """Every request when it is due; with `places` it waits for one of so many, and is late."""
        room = contextlib.nullcontext() if places is None else asyncio.Semaphore(places)

        async def one(ask: Ask) -> None:
            async with room:
                if not self._stopped.is_set():
                    await self.send(ask)

        async with asyncio.TaskGroup() as group:
            for ask in asks:
                assert ask.due is not None
                if await self._stopped_within(ask.due - self.seconds):
                    return
                group.create_task(one(ask))

    async def send(self, ask: Ask) -> Outcome:
        """One request to its end, whatever that is; adds the outcome to `outcomes`."""
        sent = self.seconds
        self.running += 1
        self._progress(self)
        chunks: list[tuple[float, int]] = []
        stream, answer, error = None, None, None
        try:
            stream = self._client.stream(
                ask.prompt,
                ask.sampling,
                speculation=self._speculation,
                cache_salt=self._cache_salt(ask.number),
                timeout=self._timeout,
            )
            async for chunk in stream:
                if chunk.token_ids:
                    # One by one: those before a failure count.
                    chunks.append((self.seconds, len(chunk.token_ids)))  # noqa: PERF401
            assert stream.result is not None
            answer = Answer.of(stream.result, with_tokens=self._keep_tokens)
        except PacelineError as failure:
            error = failure
            self.failed += 1
        finally:
            self.running -= 1
        outcome = Outcome(
            number=ask.number,
            due=sent if ask.due is None else ask.due,
            sent=sent,
            ended=self.seconds,
            chunks=tuple(chunks),
            num_resumes=stream.num_resumes if stream else 0,
            answer=answer,
            error=error,
        )
        self.outcomes.append(outcome)
        self._progress(self)
        return outcome

    def _over(self, duration: float | None) -> bool:
        return self._stopped.is_set() or (duration is not None and self.seconds >= duration)

    async def _stopped_within(self, seconds: float) -> bool:
        """Waits so long, less if the load is stopped meanwhile; True if it is. Others run in any case."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), max(seconds, 0))
        return self._stopped.is_set()


def _pause_after(error: PacelineError) -> float:
    hint = error.retry_after if isinstance(error, ResourceExhaustedError) else None
    return FAILURE_PAUSE if hint is None else hint
