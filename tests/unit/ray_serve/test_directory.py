"""Lists of replicas, as a router reports them in its own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence

import pytest

from coordinator.workers.directory.interface import Member
from paceline.core.errors import InvalidArgumentError
from paceline.ray import directory
from paceline.ray.directory import Deployment, Replica, ServeDirectory, left_out, publish

HANG = 30.0
OWN: Deployment = ("paceline", "TargetWorker")
ONE, TWO = Replica("one", "10.0.0.1:1"), Replica("two", "10.0.0.2:1")


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(directory, "_known", {})
    monkeypatch.setattr(directory, "_followers", {})
    yield
    assert not any(directory._followers.values()), "a follower is left"


async def told(*replicas: Replica, deployment: Deployment = OWN) -> None:
    """As the router does it."""
    thread = threading.Thread(target=publish, args=(deployment, replicas))
    thread.start()
    await asyncio.to_thread(thread.join, HANG)
    await asyncio.sleep(0)


def members(*replicas: Replica) -> Sequence[Member]:
    return [Member("target", each.address) for each in replicas]


async def test_members_are_the_replicas() -> None:
    started: list[Deployment] = []

    def start(deployment: Deployment) -> object:
        started.append(deployment)
        return object()

    watching = ServeDirectory("target", "paceline/TargetWorker", start).watch()
    async with asyncio.timeout(HANG):
        assert await anext(watching) == []
        assert started == [OWN]
        for replicas in ((ONE,), (ONE, TWO), (), (TWO,)):
            await told(*replicas)
            assert await anext(watching) == members(*replicas)
        await told(ONE, deployment=("paceline", "DraftWorker"))
        # A port may be another's by now: an address is listed once.
        await told(TWO, Replica("three", TWO.address))
        assert await anext(watching) == members(TWO)
        await watching.aclose()  # type: ignore[attr-defined]


async def test_a_late_directory_knows_the_present_replicas() -> None:
    await told(ONE)
    watching = ServeDirectory("target", "paceline/TargetWorker", lambda _: object()).watch()
    async with asyncio.timeout(HANG):
        assert await anext(watching) == members(ONE)
        await watching.aclose()  # type: ignore[attr-defined]


async def test_an_application_may_have_slashes() -> None:
    started: list[Deployment] = []
    watching = ServeDirectory("target", "teams/one/TargetWorker", started.append).watch()
    await anext(watching)
    await watching.aclose()  # type: ignore[attr-defined]
    assert started == [("teams/one", "TargetWorker")]


@pytest.mark.parametrize("place", ["", "paceline", "paceline/", "/TargetWorker"])
def test_an_incomplete_place_is_refused(place: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^targets: must be ray:APPLICATION/DEPLOYMENT"):
        ServeDirectory("target", place)


async def test_a_replica_that_stays_away_is_left_out() -> None:
    watching = asyncio.create_task(left_out(OWN, "one", 0.0))
    await asyncio.sleep(0)
    # Before it is listed for the first time it is not missed.
    await told(TWO)
    await told(ONE, TWO)
    await told(ONE)
    assert not watching.done()
    await told(TWO)
    await asyncio.wait_for(watching, HANG)


async def test_a_replica_missing_for_a_moment_stays() -> None:
    watching = asyncio.create_task(left_out(OWN, "one", HANG))
    await asyncio.sleep(0)
    for replicas in ((ONE,), (), (ONE,), (TWO,), (ONE, TWO)):
        await told(*replicas)
    assert not watching.done()
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
