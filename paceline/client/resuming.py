"""Resuming broken streams: when to retry and what to request. No I/O, so both clients share it.

A stream is resumed while the time without a server since its last chunk is within a budget. A stream that has
not begun is retried too, unless no server was ever reached: then the addresses may be wrong, and the caller
gets the error when each was tried. A refusal is an answer and is not retried. If the deadline comes first,
the caller gets DeadlineExceededError at the deadline, and no request is sent that cannot be answered in time.

With several coordinators each call goes to another one. It brings the received tokens, the seed and the
acceptance mode, so the answer can go on at any of them.
"""

from __future__ import annotations

import math
import random
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.client.assembler import StreamAssembler, is_empty
from paceline.client.channel import (
    CallCutError,
    ClientClosedError,
    Contact,
    DeadlineCutError,
    never_connected,
)
from paceline.client.coordinators import Coordinators
from paceline.client.results import GenerationChunk
from paceline.core.clock import Clock, monotonic
from paceline.core.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    PacelineError,
    ResourceExhaustedError,
    UnavailableError,
)
from paceline.rpc import codec
from paceline.v1 import generation_pb2

DEFAULT_RESUME_SECONDS = 30.0
"""The coordinator's default time for holding a request of a disconnected client."""
MAX_DOUBLINGS = 64
"""Cap on the doublings of a pause, against overflow; the pause has reached its bound long before."""
LEAST_TIMEOUT = 1e-3
"""Remaining seconds of the deadline below which a stream is not resumed."""


@dataclass(frozen=True, slots=True)
class ResumeBackoff:
    """Budget and pauses of resuming, in seconds."""

    seconds: float = DEFAULT_RESUME_SECONDS
    """Budget of time without a server since the last chunk; 0 disables resuming."""
    first: float = 0.2
    longest: float = 2.0
    uniform: Callable[[], float] = random.random

    def pause(self, attempt: int) -> float:
        """Seconds before attempt 0, 1, …, doubling every time.

        A random part of up to half is subtracted, so that clients disconnected together do not return
        together.
        """
        return min(self.first * 2.0 ** min(attempt, MAX_DOUBLINGS), self.longest) * (1 - self.uniform() / 2)


class Resuming:
    """One generation across several calls."""

    def __init__(
        self,
        request: generation_pb2.GenerateRequest,
        timeout: float | None,
        backoff: ResumeBackoff,
        clock: Clock = monotonic,
        coordinators: Coordinators[Any] | None = None,
    ) -> None:
        """`timeout` seconds cover all calls together; None is no deadline. `coordinators` are the client's;
        None is a single one that was never reached."""
        self.request = request
        self.assembler = StreamAssembler(request.sampling)
        self.num_resumes = 0
        """Number of times the stream was resumed."""
        self.tried: set[str] = set()
        """Coordinators that were called since all had been."""
        self._coordinators = coordinators
        self._has_reached = False
        """A server may know the request."""
        self._begins_elsewhere = False
        """The next call is the first that reaches a server, if it does."""
        self._backoff = backoff
        self._clock = clock
        self._deadline = None if timeout is None else clock() + timeout
        self._id_is_ours = not request.request_id
        self._end = threading.Lock()
        """Taken for good by the first thread that ends the request; several threads may close a stream."""
        self._contact = Contact() if coordinators is None else coordinators.contact
        self._num_pauses = 0
        """Pauses since the last chunk."""
        self._broken_at: float | None = None
        """Start of the current break; None while messages arrive."""
        self._earlier_seconds = 0.0
        """Seconds of earlier breaks since the last chunk."""
        if backoff.seconds:
            request.resumable = True
            request.request_id = request.request_id or f"gen-{secrets.token_hex(12)}"

    @property
    def timeout(self) -> float | None:
        """Seconds left for a call that begins now; None is no deadline."""
        return None if self._deadline is None else max(self._left, LEAST_TIMEOUT)

    @property
    def _left(self) -> float:
        return math.inf if self._deadline is None else self._deadline - self._clock()

    @property
    def may_go_on(self) -> bool:
        """True while the stream can be resumed: it has begun, is not complete, and resuming is enabled."""
        return bool(self._backoff.seconds) and self._begun

    @property
    def _begun(self) -> bool:
        return self.assembler.request_id is not None and self.assembler.result is None

    def feed(self, message: generation_pb2.GenerateResponse | None) -> GenerationChunk | None:
        """The chunk of a message, if any. Raises the assembler's errors."""
        if message is not None and not is_empty(message):
            self._contact.made = self._has_reached = True
            self._end_of_break()
        chunk = self.assembler.feed(message)
        if chunk is not None:
            self._num_pauses, self._earlier_seconds = 0, 0.0
        return chunk

    def _end_of_break(self) -> None:
        if self._broken_at is not None:
            self._earlier_seconds += self._clock() - self._broken_at
            self._broken_at = None

    def pause_after(self, error: PacelineError) -> float | None:
        """Seconds to wait before resuming; None if `error` ends the stream.

        The pause ends at the deadline at the latest; then `next_request` raises DeadlineExceededError.
        """
        if not self._is_a_break(error):
            # A refused name may belong to another request, which must not be cancelled.
            if isinstance(error, InvalidArgumentError):
                self._end.acquire(blocking=False)
            return None
        if not self._has_reached and self._may_begin_elsewhere:
            self._begins_elsewhere = True
            return 0.0
        now = self._clock()
        if self._broken_at is None:
            self._broken_at = now
        patience = self._backoff.seconds - self._earlier_seconds - (now - self._broken_at)
        if patience <= 0:
            return None
        pause, left = (
            min(max(self._next_pause(), _requested_pause(error)), patience),
            self._left,
        )
        if pause >= left - LEAST_TIMEOUT:
            return max(left, 0.0)
        self._num_pauses += 1
        return pause

    def _next_pause(self) -> float:
        """Doubles when all coordinators have been tried."""
        return self._backoff.pause(self._num_pauses // max(self._count, 1))

    def _is_a_break(self, error: PacelineError) -> bool:
        """True if a retry may succeed.

        A restarted server may not have room for all its former streams at once, or may count each as a new
        request of its key. For a stream that had begun, such a refusal is therefore retried.
        """
        if self._broken_at is not None and self._begun and isinstance(error, ResourceExhaustedError):
            return True
        if isinstance(error, DeadlineCutError) and self._left <= LEAST_TIMEOUT:
            return False
        if isinstance(error, ClientClosedError) or not isinstance(error, _BREAKS):
            return False
        self._contact.learn(error)
        self._has_reached = self._has_reached or not never_connected(error)
        if self.assembler.result is not None:
            return False
        return self._begun or self._contact.made or self._may_begin_elsewhere

    @property
    def _may_begin_elsewhere(self) -> bool:
        return len(self.tried) < self._count

    @property
    def _count(self) -> int:
        return 1 if self._coordinators is None else self._coordinators.count

    def next_request(self) -> generation_pb2.GenerateRequest:
        """The request that continues the broken call: the remaining tokens, with the same seed and mode.

        If the stream has not begun, everything is requested. If this client chose the request id, no other
        request has it, and the server may continue the request it holds under this id.

        Raises DeadlineExceededError if no time is left.
        """
        if self._left <= LEAST_TIMEOUT:
            raise DeadlineExceededError("the timeout expired before the stream could be resumed")
        self.assembler.end_call()
        if self._begins_elsewhere:
            self._begins_elsewhere = False
            return self.request
        # Counted here, because the stream may be closed during the pause.
        self.num_resumes += 1
        request = generation_pb2.GenerateRequest()
        request.CopyFrom(self.request)
        if not self._begun:
            if self._id_is_ours:
                codec.resumption_to_proto(codec.Resumption((0,) * self.assembler.num_choices), request)
            return request
        seed, resumption = self.assembler.resume()
        request.sampling.seed = seed
        # Another coordinator may have a different default.
        request.speculation.acceptance_mode = codec.mode_to_proto(self.assembler.mode)
        codec.resumption_to_proto(resumption, request)
        return request

    @property
    def held_as(self) -> str | None:
        """The id under which a coordinator may hold the request; None if none does."""
        named = self._id_is_ours or self.assembler.request_id is not None
        # `started` may have arrived unread, so a request may be held even if the stream has not begun.
        held = self.request.resumable and named and self.assembler.result is None
        return self.request.request_id if held else None

    def abandon(self) -> str | None:
        """The request id to cancel, once, if the server may hold the request; else None."""
        request_id = self.held_as
        return request_id if request_id is not None and self._end.acquire(blocking=False) else None


_BREAKS = (UnavailableError, CallCutError, DeadlineCutError)


def _requested_pause(error: PacelineError) -> float:
    """The server's `retry_after` in seconds; 0 if unset."""
    return (error.retry_after or 0.0) if isinstance(error, ResourceExhaustedError) else 0.0
