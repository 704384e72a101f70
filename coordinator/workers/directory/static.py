"""Workers by address, as they were given at the start."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from coordinator.workers.directory.interface import Member


@dataclass(frozen=True, slots=True)
class StaticDirectory:
    """Always the same workers."""

    members: Sequence[Member]

    async def watch(self) -> AsyncIterator[Sequence[Member]]:
        """They never change."""
        yield self.members

    def report(self, member: Member, refusal: str) -> None:
        """The log has the refusal already, and there is nobody else to tell."""
