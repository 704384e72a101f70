"""Begin and end of spans with an uneven wall clock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import chain, repeat

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from paceline.core.clock import ManualClock
from paceline.telemetry import spans
from paceline.telemetry.spans import OtlpSpans
from paceline.telemetry.traceparent import TraceParent

PARENT = TraceParent(1, 2, True)
SECOND = 10**9
HANG = 10.0
"""Seconds after which a test has failed."""


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(spans, "OTLPSpanExporter", lambda **_: exporter)
    return exporter


def told(made: OtlpSpans, exported: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    made.close()
    return {span.name: span for span in exported.get_finished_spans()}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def made(exported: InMemorySpanExporter, clock: ManualClock) -> OtlpSpans:
    return OtlpSpans("paceline-test", "127.0.0.1:1", 1.0, clock=clock)


def test_a_wall_clock_set_back_gives_no_negative_span(
    monkeypatch: pytest.MonkeyPatch, exported: InMemorySpanExporter, made: OtlpSpans, clock: ManualClock
) -> None:
    walls = chain(repeat(1000 * SECOND, 3), repeat(400 * SECOND))
    monkeypatch.setattr(spans.time, "time_ns", lambda: next(walls))
    request = made.begin("request", None, clock())
    clock.advance(2.0)
    made.record("round", PARENT, clock() - 1.5, clock(), {})
    request.end(clock(), {})
    by_name = told(made, exported)
    assert (by_name["request"].start_time, by_name["request"].end_time) == (1000 * SECOND, 1002 * SECOND)
    assert (by_name["round"].start_time, by_name["round"].end_time) == (398.5 * SECOND, 400 * SECOND)


def test_a_pause_between_clock_readings_does_not_shift_a_span(
    monkeypatch: pytest.MonkeyPatch, exported: InMemorySpanExporter, made: OtlpSpans, clock: ManualClock
) -> None:
    def walls() -> Iterator[int]:
        for late in (0.5, 0.0, 0.25):
            now = clock()
            clock.advance(late)
            yield round((100 + now) * SECOND)

    times = walls()
    monkeypatch.setattr(spans.time, "time_ns", lambda: next(times))
    began = clock()
    made.record("round", PARENT, began, began + 1.0, {})
    span = told(made, exported)["round"]
    assert (span.start_time, span.end_time) == ((100 + began) * SECOND, (101 + began) * SECOND)


def test_a_silent_collector_does_not_delay_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    over, released = threading.Event(), threading.Event()

    class Dead(InMemorySpanExporter):
        def shutdown(self) -> None:
            released.wait(HANG)
            over.set()

    monkeypatch.setattr(spans, "OTLPSpanExporter", lambda **_: Dead())
    monkeypatch.setattr(spans, "CLOSE_SECONDS", 0.05)
    try:
        OtlpSpans("paceline-test", "127.0.0.1:1", 1.0).close()
        assert not over.is_set()
    finally:
        released.set()
    assert over.wait(HANG)
