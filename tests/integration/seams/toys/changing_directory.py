"""A directory whose members are a file's lines: `changing:FILE`. A line is an address or `drain ADDRESS`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from coordinator.workers.directory.interface import Member, MemberState
from coordinator.workers.directory.registry import DIRECTORIES

POLL_SECONDS = 0.02


class ChangingDirectory:
    """Reads the file again and again. Whoever writes it replaces it whole."""

    def __init__(self, role: str, place: str) -> None:
        self._role = role
        self._file = Path(place)
        self.refusals: list[tuple[str, str]] = []

    async def watch(self) -> AsyncIterator[Sequence[Member]]:
        told: list[Member] | None = None
        while True:
            listed = [self._member(line) for line in self._file.read_text().splitlines()]
            if listed != told:
                told = listed
                yield listed
            await asyncio.sleep(POLL_SECONDS)

    def report(self, member: Member, refusal: str) -> None:
        self.refusals.append((member.address, refusal))

    def _member(self, line: str) -> Member:
        state, _, address = line.rpartition(" ")
        return Member(self._role, address, MemberState.DRAINING if state == "drain" else MemberState.READY)


def register() -> None:
    DIRECTORIES["changing"] = ChangingDirectory
