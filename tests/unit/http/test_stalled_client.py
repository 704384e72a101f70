"""Connections are dropped when their peer takes nothing, not when it is slow."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from coordinator.api.http.server.stalled_client import Taking


class FakeTransport:
    """Keeps what is written until the client takes it."""

    def __init__(self) -> None:
        self.left = 0
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.left += len(data)

    def get_write_buffer_size(self) -> int:
        return self.left

    def abort(self) -> None:
        self.aborted = True

    def get_extra_info(self, name: str) -> str:
        return f"its {name}"


class Clock:
    """The timers of a loop, rung by hand."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Any, Any]] = []

    def call_later(self, seconds: float, callback: Any, *values: Any) -> Any:
        timer = (seconds, callback, values)
        self.timers.append(timer)
        return type("Handle", (), {"cancel": lambda _: self.timers.remove(timer)})()

    def ring(self) -> None:
        ((_, callback, values),) = self.timers
        self.timers.clear()
        callback(*values)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    return clock


def watched(size: int) -> tuple[Taking, FakeTransport]:
    """A connection on which so many bytes wait to be taken."""
    transport = FakeTransport()
    taking = Taking(cast(asyncio.Transport, transport), 7.0)
    taking.write(bytes(size))
    taking.watch()
    return taking, transport


def test_a_peer_that_takes_nothing_is_dropped(clock: Clock) -> None:
    _, transport = watched(100)
    assert [seconds for seconds, *_ in clock.timers] == [7.0]
    clock.ring()
    assert transport.aborted


def test_a_peer_taking_little_by_little_is_kept(clock: Clock) -> None:
    _, transport = watched(3)
    for _ in range(3):
        transport.left -= 1
        clock.ring()
    assert not clock.timers
    assert not transport.aborted


@pytest.mark.parametrize("taken", [0, 10])
def test_further_writes_do_not_count_as_taken(taken: int, clock: Clock) -> None:
    taking, transport = watched(100)
    transport.left -= taken
    taking.write(bytes(50))
    taking.watch()
    clock.ring()
    assert transport.aborted is not bool(taken)
    assert len(clock.timers) == bool(taken)


def test_with_nothing_unsent_no_timer_runs(clock: Clock) -> None:
    watched(0)
    assert not clock.timers


def test_a_closed_connection_is_not_watched(clock: Clock) -> None:
    taking, _ = watched(100)
    taking.stop()
    taking.stop()
    assert not clock.timers


def test_other_attributes_are_the_transports(clock: Clock) -> None:
    taking, _ = watched(0)
    assert taking.get_extra_info("peername") == "its peername"
