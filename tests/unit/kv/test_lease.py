"""Leases on a clock that moves only when told to."""

from __future__ import annotations

import pytest

from paceline.core.clock import ManualClock
from paceline.kv import Leases


def test_a_lease_ends_after_its_idle_duration() -> None:
    clock = ManualClock(100.0)
    leases: Leases[str] = Leases(clock, 10.0)
    leases.renew("a")
    clock.advance(4)
    leases.renew("b")
    clock.advance(5.5)
    assert leases.expired() == []
    assert leases.next_deadline == 110.0
    clock.advance(0.5)
    assert leases.expired() == ["a"]
    leases.renew("a")
    assert leases.expired() == []
    clock.advance(20)
    assert leases.expired() == ["b", "a"]
    assert leases.expired() == ["b", "a"]  # until somebody ends them
    leases.end("b")
    assert leases.expired() == ["a"]


def test_the_longest_idle_key_comes_first() -> None:
    leases: Leases[int] = Leases(ManualClock(), 1.0)
    for key in (1, 2, 3, 1):
        leases.renew(key)
    assert list(leases) == [2, 3, 1]
    assert 2 in leases
    assert len(leases) == 3


def test_ending_a_lease_twice_is_harmless() -> None:
    leases: Leases[int] = Leases(ManualClock(), 1.0)
    leases.renew(1)
    leases.end(1)
    leases.end(1)
    assert list(leases) == []
    assert leases.next_deadline is None


@pytest.mark.parametrize("duration", [0.0, -1.0, float("nan")])
def test_a_leases_duration_must_be_positive(duration: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        Leases(ManualClock(), duration)
