"""Which of several coordinators a call goes to."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import wait

import pytest

from paceline.client.channel import ClientClosedError, never_connected
from paceline.client.coordinators import LONGEST_ABSENCE, Coordinators
from paceline.client.names import HostName
from paceline.core.clock import ManualClock
from paceline.core.errors import UnavailableError

WAIT = 30


class Link:
    def __init__(self, address: str, name: str = "") -> None:
        self.address = address
        self.name = name


class World:
    """Coordinators, a clock, and a name server."""

    def __init__(self, *addresses: str, first: int = 0) -> None:
        self.clock = ManualClock()
        self.hosts: dict[str, Sequence[str]] = {}
        self.asked = 0
        self.all: Coordinators[Link] = Coordinators(
            addresses, Link, resolve=self._resolve, clock=self.clock, first=lambda _: first
        )

    def _resolve(self, host: str) -> Sequence[str]:
        self.asked += 1
        if host not in self.hosts:
            raise OSError("no such host")
        return self.hosts[host]

    def ask(self) -> None:
        wait(self.all.ask(), WAIT)

    def new(self) -> str:
        """Where the first call of a new request goes."""
        return self.all.choose(set()).address

    def lose(self, address: str) -> None:
        """A call at this address breaks; its next one goes elsewhere."""
        self.all.choose({address}, Link(address))


def test_calls_begin_in_turn() -> None:
    world = World("a:1", "b:1", "c:1")
    assert [world.new() for _ in range(6)] == ["a:1", "b:1", "c:1"] * 2


def test_clients_begin_at_different_coordinators() -> None:
    assert [World("a:1", "b:1", first=first).new() for first in range(2)] == ["a:1", "b:1"]


def test_a_connection_is_made_once() -> None:
    world = World("a:1", "b:1")
    one, _, again = (world.all.choose(set()) for _ in range(3))
    assert one is again


def test_a_request_tries_each_coordinator_before_any_twice() -> None:
    world = World("a:1", "b:1", "c:1")
    tried: set[str] = set()
    order = [world.all.choose(tried).address for _ in range(3)]
    assert sorted(order) == ["a:1", "b:1", "c:1"]
    world.all.choose(tried)
    assert len(tried) == 1


def test_a_lone_coordinator_is_tried_again_and_again() -> None:
    world = World("a:1")
    tried: set[str] = set()
    link = world.all.choose(tried)
    assert all(world.all.choose(tried, link) is link for _ in range(5))


def test_an_absent_coordinator_is_passed_over() -> None:
    world = World("a:1", "b:1")
    world.lose("a:1")
    assert {world.new() for _ in range(5)} == {"b:1"}


def test_one_call_finds_out_whether_it_is_back() -> None:
    world = World("a:1", "b:1")
    world.lose("a:1")
    world.clock.advance(1.0)
    assert [world.new() for _ in range(6)].count("a:1") == 1


def test_an_answer_ends_an_absence() -> None:
    world = World("a:1", "b:1")
    world.lose("a:1")
    world.all.answered(Link("a:1"))
    assert [world.new() for _ in range(4)].count("a:1") == 2


def test_absences_double_to_a_limit() -> None:
    world = World("a:1", "b:1")
    world.lose("a:1")
    lengths = []
    for _ in range(8):
        seconds = 0.0
        while world.new() != "a:1" and world.new() != "a:1":
            world.clock.advance(0.5)
            seconds += 0.5
        lengths.append(seconds)
    assert lengths == [1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_ABSENCE, LONGEST_ABSENCE, LONGEST_ABSENCE]


def test_one_outage_counts_once() -> None:
    """However many streams it breaks."""
    world = World("a:1", "b:1")
    for _ in range(50):
        world.lose("a:1")
    world.clock.advance(1.0)
    assert "a:1" in [world.new() for _ in range(2)]


def test_if_all_are_absent_the_first_to_return_is_taken() -> None:
    world = World("a:1", "b:1")
    world.lose("a:1")
    world.clock.advance(0.5)
    world.lose("b:1")
    assert world.new() == "a:1"


def test_a_closed_client_chooses_nothing() -> None:
    world = World("a:1")
    link = world.all.choose(set())
    assert world.all.close() == [link]
    assert world.all.close() == []
    with pytest.raises(ClientClosedError):
        world.new()


# ---- names ---------------------------------------------------------------------------------------------


def test_every_address_of_a_name_is_a_coordinator() -> None:
    world = World("dns:x:7", "c:1")
    assert world.all.count == 1
    assert world.all.ask_first() == []
    world.hosts["x"] = ["10.0.0.2", "10.0.0.1", "[fd00::1]"]
    world.ask()
    assert sorted(world.new() for _ in range(4)) == ["10.0.0.1:7", "10.0.0.2:7", "[fd00::1]:7", "c:1"]
    found = world.all.choose({"c:1", "10.0.0.2:7", "[fd00::1]:7"})
    assert (found.address, found.name) == ("10.0.0.1:7", "x")


def test_an_unknown_name_is_an_unreached_server() -> None:
    world = World("dns:x:7")
    wait(world.all.ask_first(), WAIT)
    with pytest.raises(UnavailableError, match="x") as caught:
        world.new()
    assert never_connected(caught.value)


def test_a_name_that_fails_later_keeps_its_addresses() -> None:
    world = World("dns:x:7")
    world.hosts["x"] = ["10.0.0.1"]
    world.ask()
    for answer in (None, []):
        world.hosts = {} if answer is None else {"x": answer}
        world.ask()
        assert world.new() == "10.0.0.1:7"
    assert world.asked == 3


def test_an_address_that_left_is_forgotten() -> None:
    world = World("dns:x:7")
    world.hosts["x"] = ["10.0.0.1"]
    world.ask()
    link = world.all.choose(set())
    world.hosts["x"] = ["10.0.0.2"]
    world.ask()
    assert world.new() == "10.0.0.2:7"
    world.hosts["x"] = ["10.0.0.1"]
    world.ask()
    assert world.all.choose(set()) is not link


def test_one_question_at_a_time_is_asked() -> None:
    answers = threading.Event()
    asked = []

    def resolve(host: str) -> Sequence[str]:
        asked.append(host)
        assert answers.wait(WAIT)
        return ["10.0.0.1"]

    name = HostName("x", "7", resolve)
    first, second = name.ask(), name.ask()
    assert first is second
    answers.set()
    wait([first], WAIT)
    assert (name.addresses, asked) == (("10.0.0.1:7",), ["x"])
    wait([name.ask()], WAIT)
    assert asked == ["x", "x"]
