"""A fleet follows its directories: begin and end of links. Links are fakes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import cast

import pytest

from coordinator.workers import fleet as fleet_module
from coordinator.workers.directory.interface import Member, MemberState
from coordinator.workers.fleet import Fleet, FleetObserver
from coordinator.workers.links import Link

HANG = 30.0
ONE, TWO = Member("target", "one:1"), Member("target", "two:1")
DRAINING = Member("target", "one:1", MemberState.DRAINING)


class FakeLink:
    """Keeps whether it runs."""

    def __init__(self, member: Member) -> None:
        self.role, self.address = member.role, member.address
        self.ready, self.load, self.draining = True, 0, False
        self.runs = asyncio.Event()
        self.ended = asyncio.Event()

    async def run(self) -> None:
        self.runs.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()


class FakeDirectory:
    """Lists what a test says."""

    def __init__(self) -> None:
        self.memberships: asyncio.Queue[Sequence[Member]] = asyncio.Queue()
        self.reports: list[tuple[Member, str]] = []

    async def watch(self) -> AsyncIterator[Sequence[Member]]:
        while True:
            yield await self.memberships.get()

    def report(self, member: Member, refusal: str) -> None:
        self.reports.append((member, refusal))


class Followed:
    """A fleet that runs, and what it told."""

    def __init__(self, directories: int = 1) -> None:
        self.directories = [FakeDirectory() for _ in range(directories)]
        self.links: list[FakeLink] = []
        self.told: list[str] = []
        self._heard = asyncio.Event()
        self.fleet = Fleet(
            self.directories,
            self._make,
            FleetObserver(self._note("entered"), self._note("leaving"), self._note("left")),
        )

    def _make(self, member: Member) -> Link:
        self.links.append(FakeLink(member))
        return cast(Link, self.links[-1])

    def _note(self, what: str) -> Callable[[Link], None]:
        def note(link: Link) -> None:
            self.told.append(f"{what} {link.address.split(':')[0]}")
            self._heard.set()

        return note

    def list(self, *members: Member, directory: int = 0) -> None:
        self.directories[directory].memberships.put_nowait(members)

    async def until(self, *told: str) -> None:
        """Until no more and no less than that was told."""
        async with asyncio.timeout(HANG):
            while len(self.told) < len(told):
                self._heard.clear()
                await self._heard.wait()
        assert self.told == list(told)

    async def turns(self) -> None:
        """Long enough for a link to be ended that is to be."""
        for _ in range(20):
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def following(*members: Member, directories: int = 1) -> AsyncIterator[Followed]:
    """A fleet of which these members were listed first, if any."""
    followed = Followed(directories)
    running = asyncio.create_task(followed.fleet.run())
    if members:
        followed.list(*members)
        await followed.until("entered one")
    yield followed
    assert not running.done()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    assert all(link.ended.is_set() for link in followed.links if link.runs.is_set())


@pytest.fixture(autouse=True)
def _checks_do_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "IDLE_CHECK_SECONDS", 0)


async def test_a_member_that_appears_is_connected() -> None:
    async with following(ONE) as it:
        it.list(ONE, TWO)
        await it.until("entered one", "entered two")
        async with asyncio.timeout(HANG):
            await it.links[1].runs.wait()
        assert len(it.links) == 2


async def test_an_idle_leaving_member_is_disconnected() -> None:
    async with following(ONE) as it:
        async with asyncio.timeout(HANG):
            await it.links[0].runs.wait()
        it.list()
        await it.until("entered one", "leaving one", "left one")
        assert it.links[0].ended.is_set()
        assert not it.fleet._links
        assert not it.fleet._tasks
        assert not it.fleet._leaving


@pytest.mark.parametrize("ends", ["its sequences", "its stream"])
async def test_a_busy_member_stays_until_its_end(ends: str) -> None:
    async with following(ONE) as it:
        (link,) = it.links
        link.load = 1
        it.list()
        await it.until("entered one", "leaving one")
        await it.turns()
        assert not link.ended.is_set()
        if ends == "its stream":
            link.ready = False
        link.load = 0
        await it.until("entered one", "leaving one", "left one")
        assert link.ended.is_set()


async def test_a_returning_member_keeps_its_link() -> None:
    async with following(ONE) as it:
        it.links[0].load = 1
        it.list()
        it.list(ONE)
        await it.until("entered one", "leaving one", "entered one")
        it.links[0].load = 0
        await it.turns()
        assert not it.links[0].ended.is_set()
        assert len(it.links) == 1


async def test_a_disconnected_member_gets_a_new_link() -> None:
    gone = ("entered one", "leaving one", "left one")
    async with following() as it:
        it.list(ONE)
        it.list()
        await it.until(*gone)
        it.list(ONE)
        await it.until(*gone, "entered one")
        async with asyncio.timeout(HANG):
            await it.links[1].runs.wait()


async def test_a_changed_address_is_another_link() -> None:
    async with following(ONE) as it:
        it.list(TWO)
        await it.until("entered one", "entered two", "leaving one", "left one")
        assert [link.ended.is_set() for link in it.links] == [True, False]


async def test_a_draining_member_stays_linked() -> None:
    async with following() as it:
        it.list(DRAINING)
        await it.until("entered one", "leaving one")
        await it.turns()
        assert not it.links[0].ended.is_set()
        it.list()
        await it.until("entered one", "leaving one", "left one")


async def test_a_member_of_two_directories_has_one_link() -> None:
    async with following(directories=2) as it:
        it.list(ONE)
        it.list(ONE, directory=1)
        await it.until("entered one")
        await it.turns()
        it.list()
        await it.turns()
        assert len(it.links) == 1
        assert it.told == ["entered one"]
        it.list(directory=1)
        await it.until("entered one", "leaving one", "left one")


async def test_a_refusal_reaches_the_directories_listing_it() -> None:
    async with following(directories=2) as it:
        it.list(ONE, TWO)
        it.list(TWO, directory=1)
        await it.turns()
        it.fleet.report(cast(Link, it.links[0]), "another model")
        assert [directory.reports for directory in it.directories] == [[(ONE, "another model")], []]


async def test_a_failing_directory_ends_the_fleet() -> None:
    """A coordinator that learns no more of its workers is restarted."""

    class Broken(FakeDirectory):
        async def watch(self) -> AsyncIterator[Sequence[Member]]:
            raise ValueError("a defect")
            yield ()

    fleet = Followed().fleet
    fleet._directories = [Broken()]
    with pytest.raises(ExceptionGroup):
        async with asyncio.timeout(HANG):
            await fleet.run()


async def test_a_member_that_says_it_is_stopping_leaves() -> None:
    """Its link stays, and it enters again once it serves again."""
    async with following(ONE) as it:
        (link,) = it.links
        link.draining = True
        it.fleet.reconsider()
        await it.until("entered one", "leaving one")
        await it.turns()
        assert not link.ended.is_set()
        link.draining = False
        it.fleet.reconsider()
        await it.until("entered one", "leaving one", "entered one")
