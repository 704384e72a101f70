"""All requests by their id: who reads each one, and which are held for a client that may come back.

    read ── its client's connection is lost, or all was sent ──> held ── the client resumes ──> read
      │                                                          │
      └── failed, cancelled                                      └── time is over, cancelled, too many or much

What was sent may still be lost on its way, so a request that has ended is held as well: its tokens, and
what was reported of them. A request that was resumed has another reader: the one before it is told so and
ends. Only a request that says that it may be resumed is held: to gRPC a cancelled call and a lost connection
look the same.

Once its sequences have ended nothing but its reader keeps a request here. A call whose client takes nothing
of what is left is ended.
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
"""How often held requests are looked at."""
RESUMED = "the request was resumed by another call"
"""What a reader is told that is none any more."""


@dataclass(slots=True, eq=False)
class Request:
    """One request that was accepted: a sequence for each of its choices."""

    principal: str
    """Who sent it; nobody else can resume or cancel it."""
    call: GenerateCall
    """With the seed and the id that are used."""
    prompt: Sequence[int]
    prompt_text: str
    choices: list[Running] = field(default_factory=list)
    begun: bool = False
    """Its client was told that it was accepted."""
    reader: Reader | None = None
    """Whoever reads it now; None while it is held."""
    held_until: float = 0.0
    error: PacelineError | None = None
    """Why it was ended before its time."""
    counted: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """What is counted and timed for as long as its sequences run or wait."""

    @property
    def ended(self) -> bool:
        """True when all of its choices have finished."""
        return all(running.state.ledger.ended for running in self.choices)

    @property
    def settled(self) -> bool:
        """True when nothing more will come for any of them."""
        return all(running.ended or running.state.ledger.ended for running in self.choices)

    @property
    def num_logprobs(self) -> int:
        """Log-probabilities that are kept for its client, of all choices."""
        return sum(running.replay.num_logprobs for running in self.choices if running.replay is not None)

    @property
    def key(self) -> tuple[str, str]:
        """What it is found by."""
        return self.principal, self.call.request_id

    def is_asked_again_by(self, call: GenerateCall) -> bool:
        """True where `call` asks for what this request asked for.

        Its seed may be left out. The acceptance mode that is used may be named where the request left it out.
        """
        sampling, seed = call.sampling, self.call.sampling.seed
        if sampling.seed is None and seed is not None:
            sampling = sampling.with_seed(seed)
        speculation = call.speculation
        if self.call.speculation.mode is None and speculation.mode is self.choices[0].state.params.mode:
            speculation = replace(speculation, acceptance=None)
        return replace(call, sampling=sampling, speculation=speculation, resumption=None) == self.call

    def agrees_with(self, resumption: Resumption) -> bool:
        """True where the client's tokens are the first ones of each choice."""
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
    """A call that reads a request, or did until another call resumed it."""

    request: Request
    task: asyncio.Task[Any] | None = None
    """Whose call it is; one call may read several requests."""
    behind_since: float | None = None
    """Since when it has taken nothing of what is left; None while more may come."""
    was_cut: bool = False
    """The call was ended unread."""
    cut_with: PacelineError | None = None
    """What its client is told then; None where it may come back."""

    @property
    def is_left_behind(self) -> bool:
        """True where nothing more will come: it has but to read what is there."""
        return self.request.reader is not self or self.request.settled

    @property
    def end(self) -> PacelineError | None:
        """What has ended its request for good, read or not; None where its client may come back."""
        if self.request.reader is not self:
            return StaleEpochError(RESUMED)
        errors = [self.request.error, *(running.error for running in self.request.choices)]
        return next((each for each in errors if each and not isinstance(each, UnavailableError)), None)

    def took(self, now: float) -> None:
        """Its client has taken something."""
        if self.behind_since is not None:
            self.behind_since = now


class Requests:
    """The requests of one coordinator."""

    def __init__(
        self, dispatcher: Dispatcher, resume_seconds: float, clock: Clock, unread_timeout: float = math.inf
    ) -> None:
        self.ended = asyncio.Event()
        """Set whenever one has ended."""
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
        """Those that nobody reads: first those that have ended, of both the one that was left first."""
        held = [request for request in self._requests.values() if request.reader is None]
        return sorted(held, key=lambda request: (not request.ended, request.held_until))

    def add(self, request: Request) -> None:
        """Take one on, with a reader. Raises AlreadyExistsError."""
        before = self._requests.get(request.key)
        if before is not None and (before.reader is not None or not before.ended):
            raise AlreadyExistsError("request_id", "is running already")
        if before is not None:
            self.end(before)
        self._requests[request.key] = request
        request.reader = Reader(request)

    def may_be_resumed(self, principal: str, request_id: str) -> bool:
        """True while a request is here that says so, read or held."""
        request = self._requests.get((principal, request_id))
        return request is not None and request.call.resumable

    def resume(self, principal: str, call: GenerateCall) -> Request | None:
        """The request that `call` goes on with, for a new reader; None where there is none to go on with.

        Raises AlreadyExistsError where the id is in use for something else.
        """
        request = self._requests.get((principal, call.request_id))
        if request is None:
            return None
        if call.resumption is None and request.reader is None and request.ended:
            return None
        if call.resumption is None or not request.call.resumable:
            raise AlreadyExistsError("request_id", "is running already")
        if not request.is_asked_again_by(call):
            raise AlreadyExistsError("request_id", "is that of a request that asks for something else")
        resumed = StaleEpochError(RESUMED)
        if not request.agrees_with(call.resumption):
            # The client was served elsewhere meanwhile: what it has is what counts.
            self._end(request, resumed)
            return None
        request.reader = Reader(request)
        for running in request.choices:
            self._dispatcher.take_over(running, resumed)
        return request

    @contextlib.contextmanager
    def reading(self, request: Request, deadline: float) -> Iterator[Reader]:
        """The present task reads the request, which it was just given, for as long as the block lasts."""
        reader, lost = request.reader, False
        failure: PacelineError | None = None
        assert reader is not None
        reader.task = asyncio.current_task()
        self._readers.add(reader)  # not before: what is refused meanwhile has nobody who leaves
        try:
            yield reader
        except (GeneratorExit, asyncio.CancelledError):
            lost = True
            raise
        except PacelineError as error:
            # One that was cancelled has not failed.
            failure = None if isinstance(error, CancelledError) else error
            raise
        finally:
            self.leave(request, reader, lost=lost, deadline=deadline, failure=failure)
            del failure  # it would be in its own traceback, and keep the request

    def leave(
        self,
        request: Request,
        reader: Reader,
        *,
        lost: bool,
        deadline: float,
        failure: PacelineError | None = None,
    ) -> None:
        """A reader stops reading: the request is over, unless its client may come back.

        It may where it was `lost`, and where all was sent. `deadline` is the client's own: nothing is held
        for longer. `failure` is what its call ends with, perhaps that of another request that came with it.
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
        """End held requests that are too many, and those that run no more and keep too much.

        What is ended so may still be resumed: it is opened again from what its client has.
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
        """End a request for its client, whether anybody reads it or not. Raises NotFoundError."""
        request = self._requests.get((principal, request_id))
        if request is None:
            raise NotFoundError("no such request runs")
        self._end(request, CancelledError("the client cancelled the request"))

    def _end(self, request: Request, error: PacelineError) -> None:
        """End one that may have a reader, who is told why."""
        request.error = error
        for running in request.choices:
            running.parts.put_nowait(error)
        self.end(request)

    def end(self, request: Request, failure: PacelineError | None = None) -> None:
        """Free what it holds on both workers. May be repeated.

        `failure` is what the request failed with, if not one of its sequences did.
        """
        if self._requests.get(request.key) is request:
            del self._requests[request.key]
        failure = failure or next((running.error for running in request.choices if running.error), None)
        for running in request.choices:
            if not running.ended:
                running.error = failure  # its client did not leave it: something else of the request failed
            self._dispatcher.cancel(running)
        request.counted.close()
        self.ended.set()

    def hold_no_more(self) -> None:
        """Nobody can come back any more."""
        self._seconds = 0.0
        for request in self.held:
            self.end(request)

    def expire(self) -> None:
        """End those held whose time is over, and count no more those whose sequences are, read or held.

        Calls whose clients do not read what is left are ended as well: gRPC and HTTP wait for them for ever.
        """
        now = self._clock()
        for request in self._requests.values():
            self._settle(request)
        for request in self.held:
            if now >= request.held_until:
                self.end(request)
        self._make_room()  # of those held some may have ended meanwhile
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
                # UNAVAILABLE ended it: who resumes it is to begin anew, not to read that again.
                self.end(reader.request)
        task.cancel()

    @staticmethod
    def _settle(request: Request) -> None:
        """One whose sequences run no more does not count, whenever its client reads what is left of it."""
        if request.settled:
            request.counted.close()

    async def sweep(self) -> None:
        """Do so for ever."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.expire()
