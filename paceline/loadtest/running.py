"""Sends what is planned and notes what comes. Times are read here, and nowhere above."""

from __future__ import annotations

import asyncio
import contextlib
import math
from array import array
from collections.abc import AsyncIterator, Callable, Iterable

from paceline.client import AsyncClient
from paceline.core.clock import Clock, monotonic
from paceline.core.errors import PacelineError, ResourceExhaustedError
from paceline.core.types import SpeculationParams
from paceline.loadtest.outcomes import CompleteAnswer, RequestOutcome
from paceline.loadtest.plan import Ask

FAILURE_PAUSE = 1.0
"""Seconds a client of a closed loop waits after a failure: else a server that is down would be asked by it
as fast as a processor can, and the test be over before the server is back."""


class Load:
    """One load, sent once."""

    def __init__(
        self,
        client: AsyncClient,
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
        self.outcomes: list[RequestOutcome] = []
        self.running = 0
        self.failed = 0
        self.unsent = 0
        """Due, but still waiting for a place when the load ended."""

    @property
    def seconds(self) -> float:
        """Since the start."""
        return self._clock() - self._begun

    async def closed(self, asks: Iterable[Ask], places: int, duration: float | None) -> None:
        """`places` clients, each of which sends the next request when its last one has ended."""

        shared = iter(asks)

        async def one_client() -> None:
            for ask in shared:
                if self._over(duration):
                    return
                outcome = await self.send(ask)
                if outcome.error:
                    pause = _pause_after(outcome.error)
                    await self._stopped_within(min(pause, (duration or math.inf) - self.seconds))

        async with _tasks() as group:
            for _ in range(places):
                group.create_task(one_client())

    async def open(self, asks: Iterable[Ask], places: int | None, duration: float | None) -> None:
        """Every request when it is due; with `places` it waits for one of so many, and is late."""
        room = contextlib.nullcontext() if places is None else asyncio.Semaphore(places)

        async def one(ask: Ask) -> None:
            async with room:
                if self._over(duration):
                    self.unsent += 1
                else:
                    await self.send(ask)

        async with _tasks() as group:
            for ask in asks:
                assert ask.due is not None
                if await self._stopped_within(ask.due - self.seconds):
                    return
                group.create_task(one(ask))

    async def send(self, ask: Ask) -> RequestOutcome:
        """One request to its end, whatever that is; adds the outcome to `outcomes`."""
        sent = self.seconds
        self.running += 1
        self._progress(self)
        times, counts = array("d"), array("I")
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
                    times.append(self.seconds)
                    counts.append(len(chunk.token_ids))
            assert stream.result is not None
            answer = CompleteAnswer.of(stream.result, with_tokens=self._keep_tokens)
        except PacelineError as failure:
            error = _alone(failure)
            self.failed += 1
        finally:
            self.running -= 1
        outcome = RequestOutcome(
            number=ask.number,
            due=sent if ask.due is None else ask.due,
            sent=sent,
            ended=self.seconds,
            times=times,
            counts=counts,
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


@contextlib.asynccontextmanager
async def _tasks() -> AsyncIterator[asyncio.TaskGroup]:
    """A group whose error is the first one's own: the others were cancelled for it."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


def _pause_after(error: PacelineError) -> float:
    hint = error.retry_after if isinstance(error, ResourceExhaustedError) else None
    return FAILURE_PAUSE if hint is None else hint


def _alone(error: PacelineError) -> PacelineError:
    """Without what raised it: that holds the stream, and so all that came through it."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
