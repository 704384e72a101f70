"""Spans of requests and rounds: every parent is sent, and begins before its children."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.sequence.messages import Action, Signal
from coordinator.telemetry import call_log
from coordinator.telemetry.call_log import Call
from coordinator.telemetry.request_log import Reporting
from coordinator.telemetry.tracing import Tracer
from paceline.core.clock import ManualClock
from paceline.core.errors import InternalError, PacelineError
from paceline.core.messages import RoundVerdict
from paceline.core.types import SamplingParams, Timings, Verdict
from paceline.telemetry.traceparent import TraceParent, round_span_id
from tests.unit.coordinator.test_round import Driver

REQUEST = TraceParent(5, 7, True)


@dataclass
class Span:
    """One that was sent or has begun."""

    name: str
    parent: TraceParent = REQUEST
    began: float = 0.0
    ended: float = 0.0
    attributes: dict[str, Any] = field(default_factory=dict)
    span_id: int | None = None
    error: str = ""

    def end(self, ended: float, attributes: dict[str, Any], error: str = "") -> None:
        self.ended, self.attributes, self.error = ended, attributes, error


@dataclass
class FakeSpans:
    """Keeps what it is given."""

    made: list[Span] = field(default_factory=list)

    def begin(self, name: str, parent: Any, began: float) -> Span:
        self.made.append(Span(name, began=began))
        return self.made[-1]

    def record(self, *args: Any, **named: Any) -> None:
        self.made.append(Span(*args, **named))

    def close(self) -> None:
        pass


class Traced:
    """A sequence without a draft whose rounds are traced as the dispatcher tells of them."""

    def __init__(self, **sampling: Any) -> None:
        self.spans = FakeSpans()
        self.it = Driver(**sampling)
        self.it.state.params = replace(self.it.state.params, traceparent=str(REQUEST))
        self.running: Any = SimpleNamespace(machine=self.it.machine, state=self.it.state, error=None)
        self.tracer = Tracer(self.spans)
        self.take(self.it(Signal.TARGET_READY))

    def take(self, _: list[Action]) -> None:
        record, self.it.state.committed = self.it.state.committed, None
        if record is not None:
            self.tracer.round_ended(self.running, record, self.it.now)

    def judge(self, token: int, *, goes_on: bool = False, timings: Timings | None = None) -> None:
        verdict = Verdict(
            0, (token,), self.it.length, timings or Timings(), went_on_with=0 if goes_on else None
        )
        self.take(self.it(RoundVerdict("s", 1, self.it.state.round, verdict)))

    def end(self, error: PacelineError | None = None) -> list[Span]:
        self.running.error = error
        self.take(self.it(Signal.CANCEL))
        self.tracer.sequence_ended(self.running, self.it.now)
        return self.spans.made


def numbers(spans: list[Span]) -> list[int]:
    return [span.attributes["paceline.round"] for span in spans]


def test_a_round_begun_past_the_end_has_a_span() -> None:
    it = Traced(stop_token_ids=(9,))
    it.judge(5)
    it.judge(6, goes_on=True)
    it.judge(9, goes_on=True)
    spans = it.end()
    assert numbers(spans) == [1, 2, 3, 4]
    assert spans[-1].span_id == round_span_id(REQUEST, "s", 4), "where the target's span is below"
    assert spans[-1].attributes["paceline.num_committed_tokens"] == 0


def test_a_round_left_by_its_client_has_a_span() -> None:
    it = Traced()
    it.judge(5)
    spans = it.end()
    assert numbers(spans) == [1, 2]
    assert (spans[0].error, spans[1].error) == ("", "")


def test_a_failed_rounds_span_has_its_code() -> None:
    (span,) = Traced().end(InternalError("broken"))
    assert span.error == "INTERNAL"


@pytest.mark.parametrize("why", ["ended", "paused"])
def test_no_span_is_made_between_rounds(why: str) -> None:
    it = Traced(max_tokens=1 if why == "ended" else 50)
    if why == "paused":
        it.it(Signal.CLIENT_BEHIND)
    it.judge(5)
    assert numbers(it.end()) == [1]


def test_a_rounds_span_begins_before_the_targets() -> None:
    """Also where the target goes on by itself while its verdict is on its way."""
    it = Traced()
    there, queue, compute = [], 0.125, 0.5
    wire = 0.25
    arrived = it.it.now + wire
    for token in (5, 6, 7, 8):
        there.append(arrived)
        left = arrived + queue + compute
        it.it.now = left + wire
        it.judge(token, goes_on=token > 5, timings=Timings(queue=queue, compute=compute))
        arrived = left if token > 5 else it.it.now + wire
    there.append(arrived)
    spans = it.end()
    assert len(spans) == len(there)
    assert all(span.began <= began for span, began in zip(spans, there, strict=True))
    assert all(before.began <= after.began for before, after in itertools.pairwise(spans))
    assert all(began - span.began <= wire for span, began in zip(spans, there, strict=True))


@pytest.mark.parametrize("operation", [call_log.COMPLETION, call_log.CHAT])
def test_a_requests_span_is_named_by_its_operation(operation: str) -> None:
    spans = FakeSpans()
    call: Any = SimpleNamespace(sampling=SamplingParams())
    with call_log.taking(Call("http", "POST", 0.0, operation=operation)):  # noqa: SIM117
        with Reporting([Tracer(spans)], ManualClock(1.0)).observed(call, "m"):
            pass
    (span,) = spans.made
    assert span.name == f"{operation} m"
    assert span.attributes["gen_ai.operation.name"] == operation
