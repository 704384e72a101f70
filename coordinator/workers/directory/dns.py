"""Workers behind one name: every address that it resolves to, asked again and again."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from coordinator.workers.directory.interface import Member
from paceline.core.validation import host_and_port

log = logging.getLogger(__name__)

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""The IP addresses of a host name. Raises OSError."""

ASK_SECONDS = 2.0
"""Seconds between two queries. The system's resolver does not tell how long an answer is valid."""


async def resolve(host: str) -> Sequence[str]:
    """Ask the system's resolver. IPv6 addresses count only if there are no others: a worker has one entry."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    addresses = [(family, str(address[0])) for family, *_, address in found]
    return [a for family, a in addresses if family == socket.AF_INET] or [a for _, a in addresses]


class DnsDirectory:
    """The workers of one role behind a host name, such as a headless Service or a scaled service of Compose.

    A name that cannot be resolved for a moment keeps its last workers: their links end with their streams.
    """

    def __init__(
        self, role: str, place: str, resolve: Resolve = resolve, ask_seconds: float = ASK_SECONDS
    ) -> None:
        """`place` is HOST:PORT. Raises InvalidArgumentError naming the list of the role's addresses."""
        self._role = role
        self._host, self._port = host_and_port(f"{role}s", place)
        self._resolve = resolve
        self._ask_seconds = ask_seconds
        self._failed = False

    async def watch(self) -> AsyncIterator[Sequence[Member]]:
        """Yield the members, none before the name is known, and again whenever the addresses change."""
        listed: Sequence[Member] = await self._ask() or ()
        yield listed
        while True:
            await asyncio.sleep(self._ask_seconds)
            members = await self._ask()
            if members is not None and members != listed:
                listed = members
                yield listed

    def report(self, member: Member, refusal: str) -> None:
        """The log has the refusal already; the name's owner is not told."""

    async def _ask(self) -> Sequence[Member] | None:
        """The members by address; None if the name cannot be resolved now."""
        try:
            addresses = await self._resolve(self._host)
        except OSError as error:
            if not self._failed:
                log.warning("%s cannot be resolved, asking again: %s", self._host, error)
            self._failed = True
            return None
        self._failed = False
        hosts = sorted({f"[{address}]" if ":" in address else address for address in addresses})
        return [Member(self._role, f"{host}:{self._port}") for host in hosts]
