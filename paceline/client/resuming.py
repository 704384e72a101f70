"""When a stream that broke is asked for again, and how. No I/O, so both clients share it.

Only a stream that has begun is resumed: before `started` nothing can be lost, and the error is the caller's.
A refusal is an answer, and is not asked for again. Where the deadline comes first, it is what the caller is
told, and when it comes: the server is asked nothing that it cannot answer in time.
"""

from __future__ import annotations

import math
import random
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass

from paceline.client.assembler import StreamAssembler
from paceline.client.channel import ClientClosedError
from paceline.client.results import GenerationChunk
from paceline.core.clock import Clock, monotonic
from paceline.core.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    PacelineError,
    UnavailableError,
)
from paceline.rpc import codec
from paceline.v1 import generation_pb2

DEFAULT_MAX_RESUMES = 5
CANCEL_SECONDS = 1.0
"""How long a client that closes tries to tell the server that nobody will resume its requests."""
MAX_DOUBLINGS = 64
"""Of a pause: so many make any pause longer than any bound on it, and more would overflow."""
LEAST_TIMEOUT = 1e-3
"""Seconds. Where no more is left of the deadline a stream is not asked for again."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """How often a stream is asked for again, and after how many seconds."""

    most: int = DEFAULT_MAX_RESUMES
    first: float = 0.2
    longest: float = 5.0
    uniform: Callable[[], float] = random.random

    def pause(self, attempt: int) -> float:
        """Seconds before attempt 0, 1, …: twice as long every time.

        Up to half of it is left out at random, so that clients that were cut together do not return together.
        """
        return min(self.first * 2.0 ** min(attempt, MAX_DOUBLINGS), self.longest) * (1 - self.uniform() / 2)


class Resuming:
    """One generation over as many calls as it takes."""

    def __init__(
        self,
        request: generation_pb2.GenerateRequest,
        timeout: float | None,
        backoff: Backoff,
        clock: Clock = monotonic,
    ) -> None:
        """`timeout` seconds are for all calls together; None is no deadline."""
        self.request = request
        self.assembler = StreamAssembler(request.sampling)
        self.num_resumes = 0
        """How often it was asked for again."""
        self._backoff = backoff
        self._clock = clock
        self._deadline = None if timeout is None else clock() + timeout
        self._id_is_ours = not request.request_id
        self._end = threading.Lock()
        """Taken once and for good, by whoever ends the request first: several threads may close a stream."""
        self._pauses = 0
        self._in_vain = 0
        """Pauses since the last chunk."""
        if backoff.most:
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
        """True while it can be asked for again: it has begun, is not complete, and resumes are wanted."""
        return bool(self._backoff.most) and self._begun

    @property
    def _begun(self) -> bool:
        return self.assembler.request_id is not None and self.assembler.result is None

    def feed(self, message: generation_pb2.GenerateResponse | None) -> GenerationChunk | None:
        """The chunk a message brings. Raises what the assembler raises."""
        chunk = self.assembler.feed(message)
        if chunk is not None:
            self._in_vain = 0
        return chunk

    def pause_after(self, error: PacelineError) -> float | None:
        """Seconds to wait before the stream is asked for again; None where `error` is the end of it.

        No longer than to the deadline, at which `next_request` says so.
        """
        broke = isinstance(error, UnavailableError) and not isinstance(error, ClientClosedError)
        if not (broke and self._begun and self._pauses < self._backoff.most):
            # A refused name may be that of another request.
            if isinstance(error, InvalidArgumentError):
                self._end.acquire(blocking=False)
            return None
        pause, left = self._backoff.pause(self._in_vain), self._left
        if pause >= left - LEAST_TIMEOUT:
            return max(left, 0.0)
        self._pauses += 1
        self._in_vain += 1
        return pause

    def next_request(self) -> generation_pb2.GenerateRequest:
        """What to send in the place of the call that broke: the rest, with the same seed and mode.

        Raises DeadlineExceededError where nobody could answer it in time.
        """
        if self._left <= LEAST_TIMEOUT:
            raise DeadlineExceededError("the timeout was over before the stream could be resumed")
        # Not when the pause began, in which the stream may be closed.
        self.num_resumes += 1
        request = generation_pb2.GenerateRequest()
        request.CopyFrom(self.request)
        seed, resumption = self.assembler.resume()
        request.sampling.seed = seed
        # Another coordinator may have another default.
        request.speculation.acceptance_mode = codec.mode_to_proto(self.assembler.mode)
        codec.resumption_to_proto(resumption, request)
        return request

    def abandon(self) -> str | None:
        """The id of the request if the server may hold it for nobody; None if not, or if told before."""
        named = self._id_is_ours or self.assembler.request_id is not None
        held = self.request.resumable and named and self.assembler.result is None
        # Not where nothing is held yet: `started` may have arrived unread, and then it is.
        return self.request.request_id if held and self._end.acquire(blocking=False) else None
