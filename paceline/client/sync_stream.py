"""One generation of the synchronous client, over one call or several."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Protocol, Self

from paceline.client.abandoning import Cancel
from paceline.client.channel import CLOSED, ClientClosedError, cut_by, translated
from paceline.client.links import SyncLink
from paceline.client.results import GenerationChunk, GenerationResult
from paceline.client.resuming import Resuming
from paceline.client.sync_calls import SyncCalls
from paceline.core.errors import CancelledError, PacelineError
from paceline.v1 import generation_pb2

INTERRUPTED = "reading the stream was interrupted by an exception, and the stream cannot be resumed"
"""Error of a stream that is read again after a Ctrl-C or another exception from a signal handler."""


class _Call(Iterator[generation_pb2.GenerateResponse], Protocol):
    def cancel(self) -> bool: ...


class GenerationStream:
    """Chunks of one generation as they arrive. Closing or dropping the stream cancels the generation.

    A broken stream is resumed without losing a chunk, at another coordinator if there is one. The same holds
    if the caller continues reading after a Ctrl-C during the wait for a chunk.
    """

    def __init__(self, calls: SyncCalls, resuming: Resuming) -> None:
        self._calls = calls
        self._resuming = resuming
        self._assembler = resuming.assembler
        self._over = False
        self._interrupted = False
        """An exception interrupted reading the call: gRPC would still wait for a message and lose it."""
        self._assembler_interrupted = False
        """The exception interrupted the assembler, which may hold half a message."""
        self._closed = threading.Event()
        self._link = calls.choose(resuming.tried, resuming.timeout)
        self._call: _Call = self._link.generate(resuming.request, resuming.timeout)

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

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> GenerationChunk:
        """Wait for the next chunk. Raises PacelineError."""
        while not self._over:
            taking = False
            try:
                if self._interrupted:
                    self._leave_interrupted_call()
                with translated():
                    message = next(self._call, None)
                taking = True
                if message is not None:
                    self._calls.coordinators.answered(self._link)
                chunk = self._resuming.feed(message)
            except PacelineError as error:
                self._resume_or_raise(error)
                continue
            except BaseException:
                self._interrupted, self._assembler_interrupted = True, self._assembler_interrupted or taking
                raise
            self._over = message is None
            if chunk is not None:
                return chunk
        raise StopIteration

    def _resume_or_raise(self, error: PacelineError) -> None:
        """Resume, or raise the final error unless the stream is complete."""
        pause = self._resuming.pause_after(error)
        if pause is not None:
            try:
                self._calls.coordinators.ask()
                self._call_again(pause)
            except PacelineError as end:
                error = end
            except BaseException:
                self._interrupted = True
                raise
            else:
                return
        error = self._calls.told(cut_by(error, closed=self._closed.is_set()), self._link)
        self.close()
        self._assembler.fail(error)

    def _leave_interrupted_call(self) -> None:
        """Resume at once where the request is, since that server is healthy. Raises PacelineError."""
        if self._assembler_interrupted or not self._resuming.may_go_on:
            raise CancelledError(INTERRUPTED)
        self._call_at(lambda: self._link, 0.0)

    def _call_again(self, pause: float) -> None:
        """Resume after a pause, at another coordinator if there is one. Raises PacelineError."""
        before, resuming = self._link, self._resuming
        try:
            self._call_at(lambda: self._calls.choose(resuming.tried, resuming.timeout, before), pause)
        finally:
            held_as = resuming.held_as
            if self._link is not before and held_as is not None:
                # If only the connection broke, that coordinator still holds the request.
                self._calls.abandoning.now(partial(before.cancel, held_as))

    def _call_at(self, choose: Callable[[], SyncLink], pause: float) -> None:
        if self._closed.wait(pause):
            raise CancelledError(CLOSED)
        self._call.cancel()
        try:
            request, link = self._resuming.next_request(), choose()
            self._call = link.generate(request, self._resuming.timeout)
        except ClientClosedError:
            raise CancelledError(CLOSED) from None
        self._link = link
        self._interrupted = False
        if self._closed.is_set():
            # Closed while the call was made: the resumption may have reached the server last, so cancel
            # again.
            self._call.cancel()
            self._calls.abandoning.now(partial(link.cancel, self._resuming.request.request_id))
            raise CancelledError(CLOSED)

    def close(self) -> None:
        """End the stream; the server stops generating if it has not finished."""
        self._over = True
        self._abort()

    def _abort(self) -> None:
        """End the stream from another thread and wake its reader."""
        self._closed.set()
        self._leave(self._calls.abandoning.now)

    def _leave(self, abandon: Callable[[Cancel], None]) -> None:
        # The call first: the server must learn last that the stream will not be resumed.
        self._call.cancel()
        request_id = self._resuming.abandon()
        if request_id is not None:
            abandon(partial(self._link.cancel, request_id))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self._leave(self._calls.abandoning.soon)
