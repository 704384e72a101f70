"""The contract of worker directories; a line in DIRECTORIES_OF adds one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from harness.refusals import refused

from coordinator.workers.directory.dns import DnsDirectory
from coordinator.workers.directory.interface import Member, WorkerDirectory
from coordinator.workers.directory.joined import JoinedDirectory, Lease
from coordinator.workers.directory.registry import DIRECTORIES, open_directories
from coordinator.workers.directory.static import StaticDirectory
from paceline.core.validation import host_and_port
from paceline.ray.directory import Replica, ServeDirectory, publish
from tests.integration.seams.toys.changing_directory import ChangingDirectory

HANG = 30.0
ONE, TWO = Member("target", "10.0.0.1:7"), Member("target", "10.0.0.2:7")


class Listing:
    """A directory, and how its members change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self, members: Sequence[Member]) -> WorkerDirectory:
        """A directory of these members."""
        raise NotImplementedError

    change: Callable[[Sequence[Member]], None] | None = None
    """Makes it list others; None where that cannot be."""


class OfStatic(Listing):
    def open(self, members: Sequence[Member]) -> WorkerDirectory:
        return StaticDirectory(members)


class OfChanging(Listing):
    """The toy: the contract itself is tried on a directory that changes."""

    def open(self, members: Sequence[Member]) -> WorkerDirectory:
        self._write(members)
        return ChangingDirectory("target", str(self.folder / "members"))

    def _write(self, members: Sequence[Member]) -> None:
        new = self.folder / "new"
        new.write_text("\n".join(member.address for member in members))
        new.rename(self.folder / "members")

    change = _write


class OfDns(Listing):
    """A resolver that is told its answers."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.addresses: list[str] = []

    async def resolve(self, host: str) -> Sequence[str]:
        assert host == "targets.example"
        return self.addresses

    def open(self, members: Sequence[Member]) -> WorkerDirectory:
        self._set(members)
        return DnsDirectory("target", "targets.example:7", self.resolve, ask_seconds=0.01)

    def _set(self, members: Sequence[Member]) -> None:
        self.addresses = [member.address.rpartition(":")[0] for member in members]

    change = _set


class OfServe(Listing):
    """Lists of a router, which has its own thread."""

    def open(self, members: Sequence[Member]) -> WorkerDirectory:
        self._publish(members)
        return ServeDirectory("target", f"test/{self.folder.name}", lambda _: None)

    def _publish(self, members: Sequence[Member]) -> None:
        replicas = [Replica(member.address, member.address) for member in members]
        thread = threading.Thread(target=publish, args=(("test", self.folder.name), replicas))
        thread.start()
        thread.join()

    change = _publish


class OfJoined(Listing):
    """Workers that join and leave."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.directory = JoinedDirectory()
        self.leases: dict[Member, Lease] = {}

    def open(self, members: Sequence[Member]) -> WorkerDirectory:
        self._set(members)
        return self.directory

    def _set(self, members: Sequence[Member]) -> None:
        for member in members:
            if member not in self.leases:
                self.leases[member] = self.directory.join(member, member.address)
        for member in self.leases.keys() - set(members):
            self.directory.leave(self.leases.pop(member))

    change = _set


DIRECTORIES_OF = {
    "static": OfStatic,
    "changing": OfChanging,
    "dns": OfDns,
    "ray": OfServe,
    "joined": OfJoined,
}
"""By scheme."""


@pytest.fixture(params=sorted(DIRECTORIES_OF))
def listing(request: pytest.FixtureRequest, tmp_path: Path) -> Listing:
    return DIRECTORIES_OF[request.param](tmp_path)


async def first(directory: WorkerDirectory) -> Sequence[Member]:
    """The membership that a watch begins with."""
    async with asyncio.timeout(HANG):
        return await anext(directory.watch())


def test_every_registered_directory_is_tested() -> None:
    assert DIRECTORIES.keys() <= DIRECTORIES_OF.keys()


@pytest.mark.parametrize("members", [(), (ONE,), (ONE, TWO)])
async def test_a_watch_begins_with_the_members(listing: Listing, members: Sequence[Member]) -> None:
    told = await first(listing.open(members))
    assert list(told) == list(members)
    for member in told:
        host_and_port("address", member.address)


async def test_every_watch_sees_the_same_members(listing: Listing) -> None:
    directory = listing.open([ONE, TWO])
    assert list(await first(directory)) == list(await first(directory))


async def test_a_report_changes_no_membership(listing: Listing) -> None:
    directory = listing.open([ONE, TWO])
    for member in await first(directory):
        directory.report(member, "it serves another model")
    assert list(await first(directory)) == [ONE, TWO]


async def test_a_change_lists_all_members(listing: Listing) -> None:
    directory = listing.open([ONE])
    if listing.change is None:
        return
    watch = directory.watch()
    async with asyncio.timeout(HANG):
        assert list(await anext(watch)) == [ONE]
        for members in ([ONE, TWO], [TWO], [], [ONE]):
            listing.change(members)
            assert list(await anext(watch)) == members


async def test_a_cancelled_watch_leaves_no_task(listing: Listing) -> None:
    directory, told = listing.open([ONE]), asyncio.Event()

    async def follow() -> None:
        async for _ in directory.watch():
            told.set()

    before = asyncio.all_tasks()
    following = asyncio.create_task(follow())
    async with asyncio.timeout(HANG):
        await told.wait()
        following.cancel()
        await asyncio.wait([following])
    assert asyncio.all_tasks() == before


async def test_addresses_without_a_scheme_are_static(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[str, str]] = []

    def other(role: str, place: str) -> WorkerDirectory:
        opened.append((role, place))
        return StaticDirectory(())

    monkeypatch.setitem(DIRECTORIES, "other", other)
    static, *others = open_directories(["a:1", "other:x:1", "b:1"], ["c:1", "other:y/z"])
    assert [(member.role, member.address) for member in await first(static)] == [
        ("target", "a:1"),
        ("target", "b:1"),
        ("draft", "c:1"),
    ]
    assert opened == [("target", "x:1"), ("draft", "y/z")]
    assert len(others) == 2


@pytest.mark.parametrize("address", ["unknown:a/b", "unknown:a:b", "unknown:a:1", "::1:1", "a b:1", "a"])
def test_an_unknown_scheme_is_refused(address: str) -> None:
    with refused("drafts", "host:port"):
        open_directories(["a:1"], [address])
