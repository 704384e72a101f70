"""One timeout for the whole start of a stack, another for its stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from paceline.core.clock import ManualClock
from paceline.supervisor import ChildStatus, StackConfig, serve_stack
from paceline.supervisor import stack as stack_module

pytestmark = pytest.mark.slow


class FakeSupervisor:
    """Its children are ready after `seconds`."""

    def __init__(self, start: Start) -> None:
        self._start = start

    def __enter__(self) -> FakeSupervisor:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def start(self, specs: Sequence[Any], timeout: float) -> list[ChildStatus]:
        self._start.step(timeout)
        return [ChildStatus(spec.role, 1, "127.0.0.1:1", ready=True, starts=1) for spec in specs]


class Start:
    """Each step of a start takes `seconds`; how many each was given."""

    def __init__(self, seconds: float) -> None:
        self.clock = ManualClock()
        self.seconds = seconds
        self.given: list[float] = []

    def step(self, timeout: float) -> None:
        self.given.append(timeout)
        self.clock.advance(self.seconds)


@pytest.mark.parametrize(("seconds", "given"), [(300.25, [900.0, 599.8]), (900.0, [900.0, 0.1])])
def test_steps_share_the_start_timeout(
    seconds: float, given: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Start(seconds)
    monkeypatch.setattr(stack_module, "monotonic", start.clock)
    monkeypatch.setattr(stack_module, "Supervisor", lambda **_: FakeSupervisor(start))
    with serve_stack(StackConfig(start_timeout=900.0)) as stack:
        assert start.given == given
        stack.add("another", "coordinator", stack.config.coordinator_config(("127.0.0.1:1",), ()))
    assert start.given[2:] == [900.0], "what is started later is not of that start"


@pytest.mark.parametrize(
    ("changes", "given", "patience"),
    [
        ({}, None, 15.0),
        ({"drain_timeout": 60.0}, None, 65.0),
        ({"drain_timeout": 60.0, "coordinator": {"drain_timeout": 0.5}}, None, 5.5),
        ({"drain_timeout": 60.0}, 1.0, 1.0),
    ],
)
def test_stopping_waits_for_the_drain(
    changes: dict[str, Any], given: float | None, patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, patiences = Start(1.0), list[float]()

    def supervisor(*, stop_timeout: float, **_: Any) -> FakeSupervisor:
        patiences.append(stop_timeout)
        return FakeSupervisor(start)

    monkeypatch.setattr(stack_module, "Supervisor", supervisor)
    with serve_stack(StackConfig(**changes), stop_timeout=given):
        assert patiences == [patience]
