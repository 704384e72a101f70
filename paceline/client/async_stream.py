"""One generation of the asyncio client, over one call or several."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self

from paceline.client.async_calls import AsyncCalls
from paceline.client.channel import CLOSED, cut_by
from paceline.client.links import AsyncLink
from paceline.client.reading import CallMessages
from paceline.client.results import GenerationChunk, GenerationResult
from paceline.client.resuming import Resuming
from paceline.core.errors import CancelledError, PacelineError
from paceline.v1 import generation_pb2


class AsyncGenerationStream:
    """Chunks of one generation as they arrive. Closing or dropping the stream cancels the generation.

    A broken stream is resumed without losing a chunk, at another coordinator if there is one. A cancelled
    wait for a chunk does not end the stream: the next wait gets that chunk.
    """

    def __init__(self, calls: AsyncCalls, resuming: Resuming) -> None:
        self._calls = calls
        self._resuming = resuming
        self._assembler = resuming.assembler
        self._over = False
        self._closed = asyncio.Event()
        self._being_read = False
        self._pauses_until: float | None = None
        """Event loop time at which a broken stream is resumed."""
        self._link: AsyncLink | None = None
        self._reading: CallMessages | None = None
        if calls.coordinators.count:
            self._call(resuming.request)
        else:
            self._pauses_until = 0.0  # the first wait asks for the addresses

    @property
    def request_id(self) -> str | None:
        """The id confirmed or chosen by the server; None before its first message."""
        return self._assembler.request_id

    @property
    def result(self) -> GenerationResult | None:
        """The complete result after the last chunk."""
        return self._assembler.result

    @property
    def num_resumes(self) -> int:
        """Number of times the stream was resumed."""
        return self._resuming.num_resumes

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationChunk:
        """Wait for the next chunk. Raises PacelineError, or RuntimeError if another task is waiting."""
        if self._being_read:
            raise RuntimeError("another task is reading this stream")
        self._being_read = True
        try:
            chunk = await self._next_chunk()
        except BaseException:
            self._being_read = False
            del self  # the error's traceback must not keep a dropped stream alive
            raise
        self._being_read = False
        return chunk

    async def _next_chunk(self) -> GenerationChunk:
        while not self._over:
            try:
                if self._pauses_until is not None:
                    await _wait_until(self._closed, self._pauses_until)
                    await self._call_again()
                if self._closed.is_set():
                    raise CancelledError(CLOSED)
                assert self._reading is not None
                assert self._link is not None
                message = await self._reading.next()
                if message is not None:
                    self._calls.coordinators.answered(self._link)
                chunk = self._resuming.feed(message)
            except PacelineError as error:
                self._resume_or_raise(error)
                continue
            except asyncio.CancelledError:
                del self
                raise
            self._over = message is None
            if chunk is not None:
                return chunk
        raise StopAsyncIteration

    def _resume_or_raise(self, error: PacelineError) -> None:
        """Begin the pause before resuming, or raise the final error unless the stream is complete."""
        pause = None if self._closed.is_set() else self._resuming.pause_after(error)
        if pause is not None:
            self._calls.coordinators.ask()
            self._pauses_until = asyncio.get_running_loop().time() + pause
            return
        error = self._calls.told(cut_by(error, closed=self._closed.is_set()), self._link)
        self._end()
        self._assembler.fail(error)

    async def _call_again(self) -> None:
        """Resume after the pause, which a cancelled wait does not extend."""
        if not self._closed.is_set():
            await self._calls.find(self._resuming.timeout)
        self._pauses_until = None
        if self._closed.is_set():
            return
        if self._reading is None:
            self._call(self._resuming.request)
            return
        self._reading.cancel()
        before = self._link
        self._call(self._resuming.next_request())
        held_as = self._resuming.held_as
        if before is not None and before is not self._link and held_as is not None:
            # If only the connection broke, that coordinator still holds the request.
            self._calls.abandon(before, held_as)

    def _call(self, request: generation_pb2.GenerateRequest) -> None:
        """Begin a call, at another coordinator than the broken one if there is one."""
        link = self._calls.choose(self._resuming.tried, self._link)
        self._reading = CallMessages(link.generate(request, self._resuming.timeout))
        self._link = link

    async def aclose(self) -> None:
        """End the stream; the server stops generating if it has not finished."""
        self._end()

    def _end(self) -> None:
        self._over = True
        self._abort()

    def _abort(self) -> None:
        """End the stream from another task and wake its reader."""
        self._closed.set()
        self._leave()

    def _leave(self) -> None:
        # The call first: the server must learn last that the stream will not be resumed.
        if self._reading is not None:
            self._reading.cancel()
        if self._link is not None and (request_id := self._resuming.abandon()) is not None:
            self._calls.abandon(self._link, request_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # The call is a reference cycle, so dropping it would leave it to the garbage collector.
        if hasattr(self, "_reading"):
            self._leave()


async def _wait_until(event: asyncio.Event, when: float) -> None:
    """Wait for the event until this event loop time at the latest."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(when):
            await event.wait()
