"""Keeps one link to each worker that the directories list, and ends links that are no longer needed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.workers.directory.interface import Member, MemberState, WorkerDirectory
from coordinator.workers.links import Link

IDLE_CHECK_SECONDS = 0.05
"""Interval between checks whether the link to an unlisted worker can be ended."""

Key = tuple[str, str]
"""Role and address of a worker."""


@dataclass(frozen=True, slots=True)
class FleetObserver:
    """Callbacks of a fleet for changes of its links, called on the event loop."""

    entered: Callable[[Link], None]
    """The worker takes new sequences from now on."""
    leaving: Callable[[Link], None]
    """The worker takes no new sequences; it may enter again."""
    left: Callable[[Link], None]
    """The link has ended."""


class Fleet:
    """Follows the directories. A worker has one link even if several directories list it."""

    def __init__(
        self, directories: Sequence[WorkerDirectory], make: Callable[[Member], Link], observer: FleetObserver
    ) -> None:
        """`make` creates the link to a worker, without running it."""
        self._directories = directories
        self._make = make
        self._observer = observer
        self._listed: list[Sequence[Member]] = [()] * len(directories)
        """The present list of each directory."""
        self._links: dict[Key, Link] = {}
        self._leaving: set[Link] = set()
        """Links to workers that take no new sequences."""
        self._tasks: dict[Link, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Follow the directories and keep the links going until cancelled."""
        async with asyncio.TaskGroup() as group:
            for number in range(len(self._directories)):
                group.create_task(self._follow(number))
            await self._tend(group)

    async def _follow(self, number: int) -> None:
        async for members in self._directories[number].watch():
            self.update(number, members)

    def update(self, number: int, members: Sequence[Member]) -> None:
        """Apply the new list of directory `number`."""
        self._listed[number] = members
        self.reconsider()

    def reconsider(self) -> None:
        """Decide anew which workers take sequences, because of a list or of what a worker says of itself."""
        wanted = self._wanted()
        for key, member in wanted.items():
            if key not in self._links:
                self._links[key] = self._make(member)
                self._observer.entered(self._links[key])
        for key, link in self._links.items():
            listed = key in wanted and wanted[key].state is MemberState.READY
            takes_sequences = listed and not link.draining
            if takes_sequences and link in self._leaving:
                self._leaving.remove(link)
                self._observer.entered(link)
            elif not takes_sequences and link not in self._leaving:
                self._leaving.add(link)
                self._observer.leaving(link)
        self._changed.set()

    def report(self, link: Link, refusal: str) -> None:
        """Tell the directories that list this link's worker why it cannot be used."""
        for directory, members in zip(self._directories, self._listed, strict=True):
            for member in members:
                if (member.role, member.address) == (link.role, link.address):
                    directory.report(member, refusal)

    def _wanted(self) -> dict[Key, Member]:
        return {(member.role, member.address): member for members in self._listed for member in members}

    async def _tend(self, group: asyncio.TaskGroup) -> None:
        """Run each link until its worker is no longer listed and its stream or its sequences have ended."""
        while True:
            for link in self._links.values():
                if link not in self._tasks:
                    self._tasks[link] = group.create_task(link.run())
            unlisted = self._links.keys() - self._wanted().keys()
            for key in unlisted:
                if not (self._links[key].ready and self._links[key].load):
                    self._end(key)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IDLE_CHECK_SECONDS if unlisted else None):
                    await self._changed.wait()
            self._changed.clear()

    def _end(self, key: Key) -> None:
        link = self._links.pop(key)
        self._leaving.remove(link)
        task = self._tasks.pop(link)
        task.add_done_callback(lambda _ended: self._observer.left(link))
        task.cancel()
