"""Checks of many tenants' structures, one at a time in a separate process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.core import limits
from paceline.core.errors import (
    InternalError,
    InvalidArgumentError,
    PacelineError,
    ResourceExhaustedError,
    UnavailableError,
)
from paceline.core.structured import StructuredOutputs
from paceline.grammar.process import CompileProcess, StructureVocabulary
from paceline.grammar.turns import Memory, Turns

log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1.0
"""Retry time when the queue is full; most structures take milliseconds."""
_STOPPING = "the server is stopping"
_Key = tuple[StructureVocabulary, StructuredOutputs]


@dataclass(slots=True, eq=False)
class _Ticket:
    """A request to the process, shared by all callers that wait for its answer."""

    tenant: str
    wanted: StructuredOutputs
    ask: Callable[[], Awaitable[dict[str, Any]]]
    verb: str
    """The operation, for errors."""
    answer: asyncio.Future[bool | PacelineError] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    key: _Key | None = None
    """Key for joining callers and for caching the answer; None for neither."""
    waiting: int = 0
    running: asyncio.Future[dict[str, Any]] | None = None


class StructureChecks:
    """The checks of one server, on one event loop."""

    def __init__(self, process: CompileProcess) -> None:
        """`close` also closes `process`."""
        self._process = process
        self._turns: Turns[_Ticket] = Turns()
        self._followers: Turns[_Ticket] = Turns()
        """Requests of resuming clients, queued separately so that waiting new structures do not displace
        them."""
        self._follower_next = False
        self._joinable: dict[tuple[str, _Key], _Ticket] = {}
        self._known: Memory[_Key, bool | PacelineError] = Memory(limits.MAX_COMPILED_STRUCTURES)
        self._runner: asyncio.Task[None] | None = None
        self._current: _Ticket | None = None
        self._closed = False

    def passed(self, tenant: str, model: StructureVocabulary, wanted: StructuredOutputs) -> bool:
        """True if this tenant's structure recently passed a check."""
        return self._known.get(tenant, (model, wanted)) is True

    async def check(self, tenant: str, model: StructureVocabulary, wanted: StructuredOutputs) -> None:
        """Check that a structure is usable.

        Raises:
            InvalidArgumentError: names the field; the structure is unusable or exceeds
                `limits.MAX_STRUCTURE_SECONDS` of processor time or `limits.MAX_STRUCTURE_BYTES` of memory.
            ResourceExhaustedError: too many checks are waiting, of this tenant or of all.
            UnavailableError: the checks are closed, or the process cannot be started or was killed.
        """
        self._refuse_if_closed()
        key = model, wanted
        found = self._known.get(tenant, key)
        if found is None:
            ticket = self._joinable.get((tenant, key))
            if ticket is None:
                self._refuse_if_full(tenant)
                ticket = _Ticket(tenant, wanted, lambda: self._process.check(model, wanted), "compile")
                ticket.key = key
                self._joinable[tenant, key] = ticket
                self._add(self._turns, ticket)
            found = await self._answer(ticket)
        _raise_if_error(found)

    async def follows(
        self,
        tenant: str,
        model: StructureVocabulary,
        wanted: StructuredOutputs,
        texts: Sequence[Sequence[int]],
    ) -> bool:
        """Whether texts of token ids follow a structure, within `limits.MAX_FOLLOW_SECONDS`.

        Raises as `check`.
        """
        self._refuse_if_closed()
        if len(self._followers) >= limits.MAX_WAITING_SEQUENCES:
            raise ResourceExhaustedError("too many requests wait to be resumed", RETRY_AFTER_SECONDS)
        ticket = _Ticket(tenant, wanted, lambda: self._process.follow(model, wanted, texts), "follow")
        self._add(self._followers, ticket)
        found = await self._answer(ticket)
        _raise_if_error(found)
        return found is True

    def close(self) -> None:
        """End all waiting checks with UnavailableError and kill the process. Idempotent."""
        self._closed = True
        for ticket in self._tickets():
            _settle(ticket, UnavailableError(_STOPPING))
            if ticket.running is not None:
                ticket.running.cancel()
        if self._runner is not None:
            self._runner.cancel()
        self._process.close()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise UnavailableError(_STOPPING)

    def _refuse_if_full(self, tenant: str) -> None:
        if self._turns.of(tenant) >= limits.MAX_TENANT_STRUCTURE_CHECKS:
            raise ResourceExhaustedError(
                "too many of your requests wait for their structured_outputs to be compiled",
                RETRY_AFTER_SECONDS,
            )
        if len(self._turns) >= limits.MAX_STRUCTURE_CHECKS:
            raise ResourceExhaustedError(
                "too many requests wait for their structured_outputs to be compiled", RETRY_AFTER_SECONDS
            )

    def _add(self, turns: Turns[_Ticket], ticket: _Ticket) -> None:
        turns.add(ticket.tenant, ticket)
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run())

    async def _answer(self, ticket: _Ticket) -> bool | PacelineError:
        """Wait for the answer. If all waiting callers are cancelled, the request is cancelled too."""
        ticket.waiting += 1
        try:
            return await asyncio.shield(ticket.answer)
        finally:
            ticket.waiting -= 1
            if not ticket.waiting and not ticket.answer.done():
                self._give_up(ticket)

    def _give_up(self, ticket: _Ticket) -> None:
        ticket.answer.cancel()
        if ticket.key is not None:
            self._joinable.pop((ticket.tenant, ticket.key), None)
        for turns in (self._turns, self._followers):
            turns.remove(ticket.tenant, ticket)
        if ticket.running is not None:
            ticket.running.cancel()

    def _next(self) -> _Ticket | None:
        """The next ticket, alternating between both queues."""
        self._follower_next = not self._follower_next
        first, second = self._turns, self._followers
        if self._follower_next:
            first, second = second, first
        return first.next() or second.next()

    def _tickets(self) -> list[_Ticket]:
        """Remove and return all tickets."""
        tickets = [] if self._current is None else [self._current]
        while (ticket := self._next()) is not None:
            tickets.append(ticket)
        return tickets

    async def _run(self) -> None:
        """Process tickets until none is waiting."""
        while (ticket := self._next()) is not None:
            self._current = ticket
            ticket.running = asyncio.ensure_future(ticket.ask())
            await asyncio.wait((ticket.running,))
            self._current = None
            if not ticket.answer.done():
                self._take_answer(ticket, ticket.running)

    def _take_answer(self, ticket: _Ticket, asked: asyncio.Future[dict[str, Any]]) -> None:
        found, lasting = _found(ticket, asked)
        if ticket.key is not None:
            del self._joinable[ticket.tenant, ticket.key]
            if lasting:
                self._known.put(ticket.tenant, ticket.key, found)
        _settle(ticket, found)


def _settle(ticket: _Ticket, found: bool | PacelineError) -> None:
    if not ticket.answer.done():
        ticket.answer.set_result(found)


def _found(ticket: _Ticket, asked: asyncio.Future[dict[str, Any]]) -> tuple[bool | PacelineError, bool]:
    """The process's answer, and whether it can be cached."""
    name = ticket.wanted.field
    try:
        answer = asked.result()
    except PacelineError as error:
        return error, False
    except Exception:
        log.exception("a structure could not be checked")
        return InternalError("structured_outputs could not be checked"), False
    match answer:
        case {"kept": bool(kept)}:
            return kept, True
        case {"field": str(field_name), "reason": str(reason)}:
            return InvalidArgumentError(field_name, reason), True
        case {"over": "time"}:
            return InvalidArgumentError(name, f"takes too long to {ticket.verb}"), True
        case {"over": _}:
            return InvalidArgumentError(name, f"takes too much memory to {ticket.verb}"), True
        case {"broken": str(how)}:
            log.warning("the library failed on a structure: %s", how)
            return InvalidArgumentError(name, f"cannot be used: the library failed ({how})"), True
    # The fork was killed from outside, for example because the system ran out of memory.
    return UnavailableError("structured_outputs cannot be compiled at the moment"), False


def _raise_if_error(found: bool | PacelineError) -> None:
    """Raise a copy, because an exception raised repeatedly would accumulate tracebacks."""
    if isinstance(found, InvalidArgumentError):
        raise InvalidArgumentError(found.field, found.description)
    if isinstance(found, PacelineError):
        raise type(found)(found.message)
