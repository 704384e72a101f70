"""Sends planned requests and records their outcomes. The only module of the package that reads the clock."""

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
"""Seconds that a closed-loop client waits after a failure. Without the pause, a server that is down would
use up all requests before it is back."""


class Load:
    """One run of a load."""

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
        """`cache_salt` maps a request's number to its salt. With `keep_tokens`, outcomes hold the tokens. No
        request starts after `stopped` is set. `progress` is called when a request starts or ends."""
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
        """Requests that were due but still waited for a slot when the load ended."""

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._begun

    async def closed(self, asks: Iterable[Ask], places: int, duration: float | None) -> None:
        """Closed loop: `places` clients, each sending its next request when the last one has ended."""

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
        """Open loop: send every request when due. With `places`, a due request waits for a free slot."""
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
        """Send one request, wait for its end or error, and add the outcome to `outcomes`."""
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
        """Wait, but no longer than until the load is stopped. True if it is stopped. Always yields to other
        tasks."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), max(seconds, 0))
        return self._stopped.is_set()


@contextlib.asynccontextmanager
async def _tasks() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises the first error itself instead of an ExceptionGroup."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


def _pause_after(error: PacelineError) -> float:
    hint = error.retry_after if isinstance(error, ResourceExhaustedError) else None
    return FAILURE_PAUSE if hint is None else hint


def _alone(error: PacelineError) -> PacelineError:
    """The error without traceback and cause, which would keep the stream and its chunks alive."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
