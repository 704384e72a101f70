"""Which coordinator the next call goes to. Both clients share it.

The calls of one client begin at its coordinators in turn, from a random one on. A client may carry the
traffic of a whole service, and coordinators do not pass requests on to each other. A stream stays where it
has begun while it can: only that coordinator holds its request.

A coordinator that breaks a call is passed over for a while, which doubles with each further break. Then one
call finds out whether it is back.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from paceline.client.channel import ClientClosedError, Contact
from paceline.client.names import HostName, ResolveBlocking
from paceline.client.reaching import name_of
from paceline.core.clock import Clock, monotonic
from paceline.core.errors import UnavailableError
from paceline.rpc.resolve import resolve_blocking

FIRST_ABSENCE = 1.0
"""Seconds for which a coordinator is passed over after a break."""
LONGEST_ABSENCE = 30.0
MAX_DOUBLINGS = 8
"""Of an absence; it has reached its bound before."""


class HasAddress(Protocol):
    """A connection to one coordinator."""

    @property
    def address(self) -> str: ...


L = TypeVar("L", bound=HasAddress)


@dataclass(slots=True)
class _Absence:
    """Of a coordinator that broke a call and has answered none since."""

    count: int = 0
    """Times it has been passed over."""
    until: float = 0.0

    def renew(self, now: float) -> None:
        """Unless it lasts: one outage breaks many calls."""
        if now >= self.until:
            self.until = now + min(FIRST_ABSENCE * 2.0 ** min(self.count, MAX_DOUBLINGS), LONGEST_ABSENCE)
            self.count += 1


class Coordinators(Generic[L]):
    """The coordinators of one client. Any thread may use them."""

    def __init__(
        self,
        addresses: Sequence[str],
        connect: Callable[[str, str], L],
        *,
        resolve: ResolveBlocking = resolve_blocking,
        clock: Clock = monotonic,
        first: Callable[[int], int] = random.randrange,
    ) -> None:
        """`addresses` are checked ones. `connect` makes the connection to host:port; its second argument is
        the name that the address was found by, or empty. `first` draws the number of the first one."""
        self.contact = Contact()
        self._sources: list[str | HostName] = []
        for address in addresses:
            name = name_of(address)
            self._sources.append(address if name is None else HostName(*name, resolve))
        self._connect = connect
        self._clock = clock
        self._first = first
        self._turn: int | None = None
        self._links: dict[str, L] = {}
        """Of the listed coordinators. Streams keep the connection of one that is no longer listed."""
        self._absences: dict[str, _Absence] = {}
        self._closed = False
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """Number of coordinators known now."""
        return len(self._listed())

    def ask(self) -> list[Future[None]]:
        """Ask for the addresses of all names anew, because a connection was lost."""
        return [source.ask() for source in self._sources if isinstance(source, HostName)]

    def ask_first(self) -> list[Future[None]]:
        """The questions to wait for before `choose`: none if a coordinator is known."""
        return [] if self._listed() else self.ask()

    def choose(self, tried: set[str], broken: L | None = None) -> L:
        """The connection for the next call of a request that has tried these, and note it in `tried`.

        If it has tried all, it begins over. `broken` is the connection that has just broken its call. Raises
        UnavailableError if no coordinator is known, and ClientClosedError.
        """
        with self._lock:
            if self._closed:
                raise ClientClosedError("this client is closed")
            listed = self._listed()
            if not listed:
                raise UnavailableError(f"DNS resolution failed for {self._unknown()}")
            self._forget({address for address, _ in listed})
            if broken is not None:
                self._absences.setdefault(broken.address, _Absence()).renew(self._clock())
            if tried.issuperset(address for address, _ in listed):
                tried.clear()
            address, name = self._pick([each for each in listed if each[0] not in tried], len(listed))
            tried.add(address)
            if address not in self._links:
                self._links[address] = self._connect(address, name)
            return self._links[address]

    def answered(self, link: L) -> None:
        """The coordinator has sent a message."""
        self.contact.made = True
        if link.address in self._absences:
            with self._lock:
                self._absences.pop(link.address, None)

    def close(self) -> list[L]:
        """The connections to close; none is made afterwards."""
        with self._lock:
            self._closed = True
            links = [*self._links.values()]
            self._links.clear()
            return links

    def _listed(self) -> list[tuple[str, str]]:
        """Each address once, with the name that it was found by."""
        found: dict[str, str] = {}
        for source in self._sources:
            if isinstance(source, str):
                found.setdefault(source, "")
            else:
                for address in source.addresses:
                    found.setdefault(address, source.host)
        return list(found.items())

    def _forget(self, listed: set[str]) -> None:
        """Drop what belongs to coordinators that are no longer listed."""
        for known in (self._links, self._absences):
            for address in known.keys() - listed:
                del known[address]

    def _unknown(self) -> str:
        return ", ".join(source.host for source in self._sources if isinstance(source, HostName))

    def _pick(self, candidates: list[tuple[str, str]], count: int) -> tuple[str, str]:
        """The next one in turn that is not absent; if all are, the one whose absence ends first."""
        now = self._clock()
        if self._turn is None:
            self._turn = self._first(count)
        turn = self._turn % len(candidates)
        self._turn += 1
        in_turn = [*candidates[turn:], *candidates[:turn]]
        chosen = min(in_turn, key=lambda each: max(now, self._absent_until(each[0])))
        if chosen[0] in self._absences:
            # Nobody else tries it before this call has told more.
            self._absences[chosen[0]].renew(now)
        return chosen

    def _absent_until(self, address: str) -> float:
        absence = self._absences.get(address)
        return 0.0 if absence is None else absence.until
