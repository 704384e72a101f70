"""Observers of requests and rounds: order, content, and failing observers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.requests.observer import RequestRecord
from coordinator.scheduling.running_sequence import Running
from coordinator.sequence.round_record import RoundRecord
from coordinator.telemetry import call_log
from coordinator.telemetry.call_log import Call
from coordinator.telemetry.request_log import Reporting
from paceline.core.clock import ManualClock
from paceline.core.errors import CancelledError, InternalError, PacelineError, UnavailableError
from tests.unit.coordinator.service import FULL, Service, parts


class Notes:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def request_began(self, request: RequestRecord) -> None:
        self.told.append(("request began", request.request_id))

    def request_ended(self, request: RequestRecord) -> None:
        self.told.append(("request ended", request.request_id, type(request.error), request.ended))

    def round_ended(self, running: Running, record: RoundRecord, now: float) -> None:
        self.told.append(("round", record.number, record.num_tokens, running.last_token_at, record.ended))

    def sequence_ended(self, running: Running, now: float) -> None:
        self.told.append(("sequence ended", running.state.ledger.finish is not None, running.error))

    def worker_lost(self, role: str) -> None:
        self.told.append(("lost", role))

    def blocks_awaited(self) -> None:
        self.told.append(("waits",))


class Broken(Notes):
    """One that fails at everything."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name == "told":
            return super().__getattribute__(name)

        def fail(*_: Any) -> None:
            raise ValueError("a defect")

        return fail


def service(*observers: Any, **workers: int) -> Service:
    made = Service(**workers)
    made.it._observers = observers
    return made


def test_rounds_are_observed_in_order_before_the_end() -> None:
    notes = Notes()
    it = service(notes)
    running = it.submit(k=0, max_tokens=2)
    it.clock.advance(1.0)
    it.answer(running, 5)
    it.clock.advance(2.0)
    it.answer(running, 6)
    assert notes.told == [
        ("round", 1, 1, None, 1.0),
        ("round", 2, 1, 1.0, 3.0),
        ("sequence ended", True, None),
    ]
    assert (running.arrived_at, running.admitted_at, running.first_token_at) == (0.0, 0.0, 1.0)


def test_a_waiting_sequence_is_admitted_later() -> None:
    it = service(Notes(), max_running=1)
    first, second = it.submit(k=0, max_tokens=1), it.submit(k=0)
    assert second.admitted_at is None
    it.clock.advance(4.0)
    it.answer(first, 5)
    assert (second.arrived_at, second.admitted_at) == (0.0, 4.0)


def test_failures_and_lost_workers_are_observed() -> None:
    notes = Notes()
    it = service(notes, targets=1, drafts=1)
    running = it.submit()
    it.lose(it.drafts[0])
    it.lose(it.targets[0])
    it.it.cancel(running)
    failing = service(notes)
    failing.fail(failing.submit(), error=InternalError("broken"))
    assert notes.told[:3] == [("lost", "draft"), ("lost", "target"), ("sequence ended", False, None)]
    ((_, finished, error),) = notes.told[3:]
    assert (finished, type(error)) == (False, InternalError)


def test_a_wait_for_blocks_is_observed() -> None:
    notes = Notes()
    it = service(notes)
    one, two = it.submit(k=0), it.submit(k=0)
    it.answer(one, 5)
    it.fail(two, error=FULL)
    assert ("waits",) in notes.told


def test_a_failing_observer_does_no_harm() -> None:
    notes = Notes()
    it = service(Broken(), notes)
    running = it.submit(k=0, max_tokens=1)
    it.answer(running, 5)
    assert len(parts(running)) == 1
    assert [told[0] for told in notes.told] == ["round", "sequence ended"]


# ---- requests -------------------------------------------------------------------------------------


@pytest.fixture
def of() -> Iterator[Call]:
    call = Call("grpc", "M", 0.0)
    with call_log.taking(call):
        yield call


def generation(*, ended: bool) -> Any:
    running = SimpleNamespace(arrived_at=math.inf, state=SimpleNamespace(ledger=SimpleNamespace(ended=ended)))
    return SimpleNamespace(choices=[running], machines=[running])


@pytest.mark.parametrize(
    ("raised", "ended", "known"),
    [
        (None, True, None),
        (UnavailableError("gone"), False, UnavailableError),
        (ValueError("a defect"), False, InternalError),
        (asyncio.CancelledError(), False, CancelledError),
        (GeneratorExit(), False, CancelledError),
        (asyncio.CancelledError(), True, None),
    ],
)
def test_a_requests_end_is_observed_in_every_case(
    of: Call, raised: BaseException | None, ended: bool, known: type[PacelineError] | None
) -> None:
    clock, notes = ManualClock(2.0), Notes()
    reporting = Reporting([Broken(), notes], clock)
    call: Any = SimpleNamespace()

    def run() -> None:
        with reporting.observed(call, "m") as request:
            request.request_id = "r"
            made = generation(ended=ended)
            reporting.taken_on(request, made)
            assert made.choices[0].arrived_at == 2.0
            clock.advance(3.0)
            if raised is not None:
                raise raised

    if raised is None:
        run()
    else:
        with pytest.raises(type(raised)):
            run()
    assert notes.told == [
        ("request began", ""),
        ("request ended", "r", type(None) if known is None else known, 5.0),
    ]
    assert [request.request_id for request in of.requests] == ["r"]
    assert of.context == {"request_id": "r"}


def test_a_resumed_request_keeps_its_arrival_time(of: Call) -> None:
    """Otherwise its first token would precede its arrival."""
    it = service()
    running = it.submit()
    reporting = Reporting((), it.clock)
    generation: Any = SimpleNamespace(choices=[running])
    for moment in (0.0, 8.0):
        it.clock.advance(moment)
        with reporting.observed(None, "m") as request:  # type: ignore[arg-type]
            reporting.taken_on(request, generation)
        assert running.arrived_at == 0.0


def test_a_call_keeps_its_first_name(of: Call) -> None:
    of.name("call")
    of.name("call-0")
    assert of.context == {"request_id": "call"}


def test_naming_a_request_outside_a_call_is_harmless() -> None:
    with Reporting([], ManualClock()).observed(SimpleNamespace(), "m") as request:  # type: ignore[arg-type]
        assert request.model == "m"
    assert call_log.current.get() is None
