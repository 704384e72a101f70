"""All requests by their id, with their readers, and requests held for a client that may come back.

    read ── connection lost, or everything sent ──> held ── the client resumes ──> read
      │                                               │
      └── failed, cancelled                           └── expired, cancelled, too many or too large

Messages that were sent may still be lost on the way, so an ended request is also held, with its tokens and
its reports. When a request is resumed, its previous reader gets an error and ends. Only a request that is
marked as resumable is held, because a cancelled call and a lost connection look the same to gRPC.

After its sequences have ended, only the reader keeps a request here. A call whose client stops reading the
remaining messages is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coordinator.scheduling.dispatcher import Dispatcher
from coordinator.scheduling.running_sequence import Running
from paceline.core import limits
from paceline.core.clock import Clock
from paceline.core.errors import (
    AlreadyExistsError,
    CancelledError,
    NotFoundError,
    PacelineError,
    StaleEpochError,
    UnavailableError,
)
from paceline.rpc.codec import GenerateCall, Resumption

SWEEP_SECONDS = 0.25
"""Interval between checks of held requests."""
RESUMED = "the request was resumed by another call"
"""Error message for a reader whose request another call has resumed."""


@dataclass(slots=True, eq=False)
class Request:
    """An accepted request: one sequence for each of its choices."""

    principal: str
    """The caller that sent the request. No other caller can resume or cancel it."""
    call: GenerateCall
    """The call, with the seed and the id that are used."""
    prompt: Sequence[int]
    prompt_text: str
    choices: list[Running] = field(default_factory=list)
    begun: bool = False
    """True once the client has been told that the request is accepted."""
    reader: Reader | None = None
    """The current reader; None while the request is held."""
    held_until: float = 0.0
    error: PacelineError | None = None
    """The error that ended the request early."""
    counted: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Counters and timers that run while its sequences run or wait."""

    @property
    def ended(self) -> bool:
        """True when all of its choices have finished."""
        return all(running.state.ledger.ended for running in self.choices)

    @property
    def settled(self) -> bool:
        """True when no more messages will come for any choice."""
        return all(running.ended or running.state.ledger.ended for running in self.choices)

    @property
    def num_logprobs(self) -> int:
        """Number of log-probabilities kept for the client, over all choices."""
        return sum(running.replay.num_logprobs for running in self.choices if running.replay is not None)

    @property
    def key(self) -> tuple[str, str]:
        """The key of the request in the registry."""
        return self.principal, self.call.request_id

    def is_asked_again_by(self, call: GenerateCall) -> bool:
        """True if `call` asks for the same as this request.

        The call may leave out the seed. It may name the acceptance mode in use if the request did not.
        """
        sampling, seed = call.sampling, self.call.sampling.seed
        if sampling.seed is None and seed is not None:
            sampling = sampling.with_seed(seed)
        speculation = call.speculation
        if self.call.speculation.mode is None and speculation.mode is self.choices[0].state.params.mode:
            speculation = replace(speculation, acceptance=None)
        return replace(call, sampling=sampling, speculation=speculation, resumption=None) == self.call

    def agrees_with(self, resumption: Resumption) -> bool:
        """True if the client's tokens are the first tokens of each choice."""
        for index, (count, running) in enumerate(zip(resumption.resume_from, self.choices, strict=True)):
            ledger = running.state.ledger
            if running.replay is None or not running.replay.covers(count, ledger):
                return False
            mine = ledger.token_ids[ledger.prompt_length :][:count]
            if resumption.received and list(resumption.received[index]) != mine:
                return False
        return True


@dataclass(slots=True, eq=False)
class Reader:
    """A call that reads a request until another call resumes it."""

    request: Request
    task: asyncio.Task[Any] | None = None
    """The task of the call; one call may read several requests."""
    behind_since: float | None = None
    """Time since which the client has taken none of the remaining messages; None while more may come."""
    was_cut: bool = False
    """True if the call was ended before the client read everything."""
    cut_with: PacelineError | None = None
    """The error for the client of a cut call; None if the client may come back."""

    @property
    def is_left_behind(self) -> bool:
        """True if no more messages will come, so that only queued ones are left to read."""
        return self.request.reader is not self or self.request.settled

    @property
    def end(self) -> PacelineError | None:
        """The error that has ended the request for good; None if the client may come back."""
        if self.request.reader is not self:
            return StaleEpochError(RESUMED)
        errors = [self.request.error, *(running.error for running in self.request.choices)]
        return next((each for each in errors if each and not isinstance(each, UnavailableError)), None)

    def took(self, now: float) -> None:
        """The client has taken a message."""
        if self.behind_since is not None:
            self.behind_since = now


class Requests:
    """The requests of one coordinator."""

    def __init__(
        self, dispatcher: Dispatcher, resume_seconds: float, clock: Clock, unread_timeout: float = math.inf
    ) -> None:
        self.ended = asyncio.Event()
        """Set whenever a request has ended."""
        self._dispatcher = dispatcher
        self._seconds = resume_seconds
        self._clock = clock
        self._unread_timeout = unread_timeout
        self._requests: dict[tuple[str, str], Request] = {}
        self._readers: set[Reader] = set()

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def held(self) -> list[Request]:
        """Requests without a reader: ended ones first, then by the end of their holding time."""
        held = [request for request in self._requests.values() if request.reader is None]
        return sorted(held, key=lambda request: (not request.ended, request.held_until))

    def add(self, request: Request) -> None:
        """Add a request, with a reader. Raises AlreadyExistsError."""
        before = self._requests.get(request.key)
        if before is not None and (before.reader is not None or not before.ended):
            raise AlreadyExistsError("request_id", "is running already")
        if before is not None:
            self.end(before)
        self._requests[request.key] = request
        request.reader = Reader(request)

    def may_be_resumed(self, principal: str, request_id: str) -> bool:
        """True while a resumable request with this id is here, read or held."""
        request = self._requests.get((principal, request_id))
        return request is not None and request.call.resumable

    def resume(self, principal: str, call: GenerateCall) -> Request | None:
        """The request that `call` resumes, with a new reader; None if there is none to resume.

        Raises AlreadyExistsError if the id belongs to another request.
        """
        request = self._requests.get((principal, call.request_id))
        if request is None:
            return None
        if call.resumption is None and request.reader is None and request.ended:
            return None
        if call.resumption is None or not request.call.resumable:
            raise AlreadyExistsError("request_id", "is running already")
        if not request.is_asked_again_by(call):
            raise AlreadyExistsError("request_id", "belongs to a different request")
        resumed = StaleEpochError(RESUMED)
        if not request.agrees_with(call.resumption):
            # The client was served elsewhere meanwhile; the tokens that it has are the valid ones.
            self._end(request, resumed)
            return None
        request.reader = Reader(request)
        for running in request.choices:
            self._dispatcher.take_over(running, resumed)
        return request

    @contextlib.contextmanager
    def reading(self, request: Request, deadline: float) -> Iterator[Reader]:
        """Let the current task read the request, which it was just given, while the block lasts."""
        reader, lost = request.reader, False
        failure: PacelineError | None = None
        assert reader is not None
        reader.task = asyncio.current_task()
        self._readers.add(reader)  # not earlier: a call refused before this has no reader that leaves
        try:
            yield reader
        except (GeneratorExit, asyncio.CancelledError):
            lost = True
            raise
        except PacelineError as error:
            # A cancelled request has not failed.
            failure = None if isinstance(error, CancelledError) else error
            raise
        finally:
            self.leave(request, reader, lost=lost, deadline=deadline, failure=failure)
            del failure  # the error's own traceback would keep the request alive

    def leave(
        self,
        request: Request,
        reader: Reader,
        *,
        lost: bool,
        deadline: float,
        failure: PacelineError | None = None,
    ) -> None:
        """A reader stops reading. The request ends unless its client may come back.

        The client may come back if the reader was `lost` or everything was sent. `deadline` is the client's
        own: no request is held beyond it. `failure` is the error of the call, which may belong to another
        request of the same call.
        """
        self._readers.discard(reader)
        if request.reader is not reader:
            return
        until = min(self._clock() + self._seconds, deadline)
        may_return = (lost or request.ended) and request.begun and request.call.resumable
        if not (may_return and until > self._clock()):
            self.end(request, failure)
        elif self._requests.get(request.key) is request:
            request.reader, request.held_until = None, until
            for running in request.choices:
                running.read = False
            self._settle(request)
            self._make_room()

    def _make_room(self) -> None:
        """End held requests above the limit, and ended ones that keep too many log-probabilities.

        A request that is ended here can still be resumed: it is opened again with the client's tokens.
        """
        held = self.held
        for oldest in held[: -limits.MAX_HELD_REQUESTS]:
            self.end(oldest)
        keeping = [
            (request, request.num_logprobs)
            for request in held[-limits.MAX_HELD_REQUESTS :]
            if request.settled
        ]
        total = sum(kept for _, kept in keeping)
        for oldest, kept in keeping:
            if total <= limits.MAX_HELD_LOGPROBS:
                return
            if kept:
                self.end(oldest)
                total -= kept

    def cancel(self, principal: str, request_id: str) -> None:
        """End a request for its client, read or held. Raises NotFoundError."""
        request = self._requests.get((principal, request_id))
        if request is None:
            raise NotFoundError("no such request is running")
        self._end(request, CancelledError("the client cancelled the request"))

    def _end(self, request: Request, error: PacelineError) -> None:
        """End a request, and give the error to its reader if it has one."""
        request.error = error
        for running in request.choices:
            running.parts.put_nowait(error)
        self.end(request)

    def end(self, request: Request, failure: PacelineError | None = None) -> None:
        """Free the blocks of the request on both workers. May be repeated.

        `failure` is the error of the request if none of its own sequences failed.
        """
        if self._requests.get(request.key) is request:
            del self._requests[request.key]
        failure = failure or next((running.error for running in request.choices if running.error), None)
        for running in request.choices:
            if not running.ended:
                running.error = failure  # the client did not leave: another part of the request failed
            self._dispatcher.cancel(running)
        request.counted.close()
        self.ended.set()

    def hold_no_more(self) -> None:
        """End all held requests: clients can no longer come back."""
        self._seconds = 0.0
        for request in self.held:
            self.end(request)

    def expire(self) -> None:
        """End held requests that have expired, and stop counting requests whose sequences have ended.

        Calls whose clients do not read the remaining messages are ended too: gRPC and HTTP wait for them
        forever.
        """
        now = self._clock()
        for request in self._requests.values():
            self._settle(request)
        for request in self.held:
            if now >= request.held_until:
                self.end(request)
        self._make_room()  # some of the held requests may have ended meanwhile
        self._end_unread(now)

    def _end_unread(self, now: float) -> None:
        behind: dict[asyncio.Task[Any], float] = {}
        for reader in self._readers:
            if reader.behind_since is None and reader.is_left_behind:
                reader.behind_since = now
            if reader.task is not None:
                # A call is busy while it reads one of its requests.
                since = math.inf if reader.behind_since is None else reader.behind_since
                behind[reader.task] = max(since, behind.get(reader.task, since))
        for task, since in behind.items():
            if now - since >= self._unread_timeout:
                self._end_call(task)

    def _end_call(self, task: asyncio.Task[Any]) -> None:
        for reader in [reader for reader in self._readers if reader.task is task]:
            self._readers.discard(reader)
            reader.was_cut, reader.cut_with = True, reader.end
            if reader.cut_with is None and not reader.request.ended:
                # UNAVAILABLE ended the request: a resumed call has to start afresh, not read that error
                # again.
                self.end(reader.request)
        task.cancel()

    @staticmethod
    def _settle(request: Request) -> None:
        """Stop counting a request whose sequences have ended, even if its client has not read everything."""
        if request.settled:
            request.counted.close()

    async def sweep(self) -> None:
        """Run `expire` periodically until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.expire()
