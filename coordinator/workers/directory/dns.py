"""Workers behind one name: every address that it resolves to, asked again and again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

from coordinator.workers.directory.interface import Member
from paceline.core.validation import host_and_port
from paceline.rpc.resolve import Resolve, resolve

log = logging.getLogger(__name__)

ASK_SECONDS = 2.0
"""Seconds between two queries. The system's resolver does not tell how long an answer is valid."""


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
        return [Member(self._role, f"{address}:{self._port}") for address in sorted(set(addresses))]
