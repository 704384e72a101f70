"""When a stream that broke is asked for again, and how. No I/O, so both clients share it.

A stream is asked for again while the time without a server is within a budget, which begins anew with every
chunk. One that has not begun is asked for again too, unless the server was never reached: its address may be
wrong, and the error is the caller's at once. A refusal is an answer, and is not asked for again. Where the
deadline comes first, it is what the caller is told, and when it comes: the server is asked nothing that it
cannot answer in time.
"""

from __future__ import annotations

import math
import random
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass

from paceline.client.assembler import StreamAssembler
from paceline.client.channel import CallCutError, ClientClosedError, Contact
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
"""As long as a coordinator holds a request for a client that is away."""
CANCEL_SECONDS = 1.0
"""How long a client that closes tries to tell the server that nobody will resume its requests."""
MAX_DOUBLINGS = 64
"""Of a pause: so many make any pause longer than any bound on it, and more would overflow."""
LEAST_TIMEOUT = 1e-3
"""Seconds. Where no more is left of the deadline a stream is not asked for again."""


@dataclass(frozen=True, slots=True)
class ResumeBackoff:
    """For how long a stream is asked for again, and after which pauses. All in seconds."""

    seconds: float = DEFAULT_RESUME_SECONDS
    """Without a server, since the last chunk; 0 never asks again."""
    first: float = 0.2
    longest: float = 2.0
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
        backoff: ResumeBackoff,
        clock: Clock = monotonic,
        contact: Contact | None = None,
    ) -> None:
        """`timeout` seconds are for all calls together; None is no deadline. `contact` is the client's."""
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
        self._contact = contact or Contact()
        self._in_vain = 0
        """Pauses since the last chunk."""
        self._broken_at: float | None = None
        """Since when no call brings anything; None while one does."""
        self._away = 0.0
        """Seconds that earlier breaks lasted, since the last chunk."""
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
        """True while it can be asked for again: it has begun, is not complete, and resumes are wanted."""
        return bool(self._backoff.seconds) and self._begun

    @property
    def _begun(self) -> bool:
        return self.assembler.request_id is not None and self.assembler.result is None

    def feed(self, message: generation_pb2.GenerateResponse | None) -> GenerationChunk | None:
        """The chunk a message brings. Raises what the assembler raises."""
        if message is not None:
            self._contact.made = True
            self._end_of_break()
        chunk = self.assembler.feed(message)
        if chunk is not None:
            self._in_vain, self._away = 0, 0.0
        return chunk

    def _end_of_break(self) -> None:
        if self._broken_at is not None:
            self._away += self._clock() - self._broken_at
            self._broken_at = None

    def pause_after(self, error: PacelineError) -> float | None:
        """Seconds to wait before the stream is asked for again; None where `error` is the end of it.

        No longer than to the deadline, at which `next_request` says so.
        """
        if not self._is_a_break(error):
            # A refused name may be that of another request.
            if isinstance(error, InvalidArgumentError):
                self._end.acquire(blocking=False)
            return None
        now = self._clock()
        if self._broken_at is None:
            self._broken_at = now
        patience = self._backoff.seconds - self._away - (now - self._broken_at)
        if patience <= 0:
            return None
        pause, left = min(max(self._backoff.pause(self._in_vain), _asked_pause(error)), patience), self._left
        if pause >= left - LEAST_TIMEOUT:
            return max(left, 0.0)
        self._in_vain += 1
        return pause

    def _is_a_break(self, error: PacelineError) -> bool:
        """True where what is asked again may be answered.

        A server that came back may have no place at once for all streams that it lost, or count each as a new
        request of its key: such a refusal is no answer to a stream that it had taken on before.
        """
        if self._broken_at is not None and self._begun and isinstance(error, ResourceExhaustedError):
            return True
        if isinstance(error, ClientClosedError) or not isinstance(error, UnavailableError | CallCutError):
            return False
        self._contact.learn(error)
        return self.assembler.result is None and (self._begun or self._contact.made)

    def next_request(self) -> generation_pb2.GenerateRequest:
        """What to send in the place of the call that broke: the rest, with the same seed and mode.

        Before it has begun all of it is asked for. A name that is ours is that of no other request, so the
        server may go on with what it has under it.

        Raises DeadlineExceededError where nobody could answer it in time.
        """
        if self._left <= LEAST_TIMEOUT:
            raise DeadlineExceededError("the timeout was over before the stream could be resumed")
        # Not when the pause began, in which the stream may be closed.
        self.num_resumes += 1
        request = generation_pb2.GenerateRequest()
        request.CopyFrom(self.request)
        if not self._begun:
            if self._id_is_ours:
                codec.resumption_to_proto(codec.Resumption((0,) * self.assembler.num_choices), request)
            return request
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


def _asked_pause(error: PacelineError) -> float:
    """Seconds that the server asks to be left alone for; 0 where it does not say."""
    return (error.retry_after or 0.0) if isinstance(error, ResourceExhaustedError) else 0.0
