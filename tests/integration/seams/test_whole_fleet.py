"""Every part of a fleet is replaced under load, and no client notices: two coordinators, shared workers.

Half of the workers are found behind host names, the others join. Streams are compared with plain decoding.
"""

from __future__ import annotations

import contextlib
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness.fleets import SteadyLoad, WorkerFleet
from harness.pair import Pair
from harness.restarting import undisturbed

from paceline.client import Client

NAMED, JOINED = False, True
DRAIN, KILL = signal.SIGTERM, signal.SIGKILL


@dataclass(frozen=True)
class Course:
    """What happens to which fleet."""

    pair: str
    """The fixture of the models."""
    workers: tuple[tuple[str, bool], ...]
    """Role, and whether it joins. The first of each role that is named comes before the coordinators."""
    faults: tuple[tuple[int, signal.Signals], ...]
    """Numbers of workers, in the order in which they are replaced, and how they end."""
    streams: int


SMALL = Course(
    "tiny_pair",
    (("target", NAMED), ("draft", NAMED), ("target", JOINED)),
    ((0, DRAIN), (2, KILL)),
    streams=4,
)
WHOLE = Course(
    "pair_paths",
    tuple((role, joins) for joins in (NAMED, JOINED, NAMED) for role in ("target", "draft")),
    tuple((number, fault) for fault in (DRAIN, KILL) for number in range(6)),
    streams=32,
)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "course", [SMALL, pytest.param(WHOLE, marks=pytest.mark.full)], ids=["small", "whole"]
)
def test_a_replaced_fleet_loses_no_token(
    course: Course,
    request: pytest.FixtureRequest,
    toys_known: Callable[..., AbstractContextManager[None]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """One coordinator is killed when half of the workers have been replaced."""
    pair: Pair = request.getfixturevalue(course.pair)
    hosts = tmp_path / "hosts"
    monkeypatch.setenv("PACELINE_TEST_HOSTS", str(hosts))
    with toys_known("host_names"), contextlib.ExitStack() as opened:
        fleet = WorkerFleet(pair, hosts, opened)
        for role, joins in course.workers[:2]:
            fleet.add_worker(role, joins=joins)
        fleet.add_coordinators(2)
        for role, joins in course.workers[2:]:
            fleet.add_worker(role, joins=joins)
        first, other = fleet.coordinators
        asked = undisturbed(first.client, 16, num_speculative_tokens=0)
        places = [*fleet.workers]
        client = opened.enter_context(Client([first.address, other.address]))
        with SteadyLoad(client, asked, course.streams) as load:
            for done, (number, fault) in enumerate(course.faults):
                if done == len(course.faults) // 2:
                    fleet.kill_coordinator()
                places[number] = fleet.replace(places[number], fault)
        print(dict(load.counts))
        assert load.counts == Counter(sound=load.counts["sound"], resumed=load.counts["resumed"])
        assert load.counts["sound"] >= course.streams
        assert load.counts["resumed"] > 0, "the killed coordinator had streams"
        status = other.client.status().coordinator
        assert (status.running, status.failed_requests) == (0, 0)
        fleet.check_pools_whole()
