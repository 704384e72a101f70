"""Workers behind one name: every address that it resolves to, asked again and again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from coordinator.workers.directory.interface import Member
from paceline.core.validation import host_and_port
from paceline.rpc.resolve import ASK_SECONDS, Resolve, follow, resolve


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

    async def watch(self) -> AsyncIterator[Sequence[Member]]:
        """Yield the members, none before the name is known, and again whenever the addresses change."""
        async for addresses in follow(self._host, self._port, self._resolve, self._ask_seconds):
            yield [Member(self._role, address) for address in addresses]

    def report(self, member: Member, refusal: str) -> None:
        """The log has the refusal already; the name's owner is not told."""
