"""Workers that join by themselves, each for as long as it keeps its lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from coordinator.workers.directory.interface import Member
from paceline.core.errors import AlreadyExistsError


@dataclass(slots=True, eq=False)
class Lease:
    """The membership of one worker."""

    member: Member
    instance_id: str
    """Distinguishes a restarted worker from its predecessor at the same address."""
    told: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)
    """Why the coordinator cannot use the worker; None ends the lease."""


class JoinedDirectory:
    """Lists the workers that hold a lease."""

    def __init__(self) -> None:
        self._leases: dict[tuple[str, str], Lease] = {}
        """By role and address."""
        self._changed = asyncio.Event()

    def join(self, member: Member, instance_id: str) -> Lease:
        """List a worker. A worker that joins once more, over a new connection, takes its own lease over.

        Raises AlreadyExistsError if another worker holds a lease for this address.
        """
        key = member.role, member.address
        before = self._leases.get(key)
        if before is not None:
            if before.instance_id != instance_id:
                raise AlreadyExistsError("address", f"another worker has joined as {member.address}")
            before.told.put_nowait(None)
        lease = self._leases[key] = Lease(member, instance_id)
        self._changed.set()
        return lease

    def leave(self, lease: Lease) -> None:
        """List the worker no longer, unless a newer lease has replaced this one."""
        key = lease.member.role, lease.member.address
        if self._leases.get(key) is lease:
            del self._leases[key]
            self._changed.set()

    async def watch(self) -> AsyncIterator[Sequence[Member]]:
        """Yield the members, and again whenever one joins or leaves."""
        while True:
            self._changed.clear()
            yield [lease.member for lease in self._leases.values()]
            await self._changed.wait()

    def report(self, member: Member, refusal: str) -> None:
        """Tell the worker itself."""
        lease = self._leases.get((member.role, member.address))
        if lease is not None:
            lease.told.put_nowait(refusal)
