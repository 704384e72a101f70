"""Exports spans with the OpenTelemetry SDK to an OTLP collector over gRPC. Imported only for tracing."""

from __future__ import annotations

import os
import threading
import time
from importlib.metadata import version

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from paceline.core.clock import Clock, monotonic
from paceline.telemetry.span_interface import Attributes
from paceline.telemetry.traceparent import TraceParent

EXPORT_SECONDS = 3.0
"""Time limit of one batch, retries included."""
CLOSE_SECONDS = 3.0
_READINGS = 3


class _Ids(RandomIdGenerator):
    """Random ids, unless the caller sets the id of the next span."""

    def __init__(self) -> None:
        self.next_span_id: int | None = None

    def generate_span_id(self) -> int:
        given, self.next_span_id = self.next_span_id, None
        return given if given is not None else super().generate_span_id()


class OtlpSpans:
    """Implements `Spans`. One thread creates spans; the SDK's thread exports them."""

    def __init__(self, service: str, endpoint: str, ratio: float, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._ids = _Ids()
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(ratio)),
            resource=Resource.create(
                {
                    "service.name": service,
                    "service.version": version("paceline"),
                    "process.pid": os.getpid(),
                }
            ),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("paceline", version("paceline"))

    def begin(self, name: str, parent: TraceParent | None, began: float) -> OtlpSpan | None:
        """Begin a server span; None if not sampled."""
        context = _context(parent) if parent is not None else Context()
        era = self._era()
        start = _wall(began, era)
        span = self._tracer.start_span(name, context, kind=SpanKind.SERVER, start_time=start)
        return OtlpSpan(span, era) if span.is_recording() else None

    def record(
        self,
        name: str,
        parent: TraceParent,
        began: float,
        ended: float,
        attributes: Attributes,
        *,
        span_id: int | None = None,
        error: str = "",
    ) -> None:
        """Record a completed span."""
        self._ids.next_span_id = span_id
        era = self._era()
        span = self._tracer.start_span(name, _context(parent), start_time=_wall(began, era))
        self._ids.next_span_id = None
        _end(span, _wall(ended, era), attributes, error)

    def close(self) -> None:
        """Export the remaining spans. An unresponsive collector does not block the process."""
        closing = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)

    def _era(self) -> int:
        """Unix time in nanoseconds at 0 of the monotonic clock, from the fastest of several readings.

        A reading that is interrupted between both clocks would shift the spans.
        """
        readings = []
        for _ in range(_READINGS):
            before, wall, after = self._clock(), time.time_ns(), self._clock()
            readings.append((after - before, wall - round((before + after) / 2 * 1e9)))
        return min(readings)[1]


class OtlpSpan:
    """Implements `OpenSpan`."""

    def __init__(self, span: Span, era: int) -> None:
        self._span = span
        self._era = era

    @property
    def parent(self) -> TraceParent:
        """The reference for child spans."""
        context = self._span.get_span_context()
        return TraceParent(context.trace_id, context.span_id, True)

    def end(self, ended: float, attributes: Attributes, error: str = "") -> None:
        """End the span; `error` is a code."""
        _end(self._span, _wall(ended, self._era), attributes, error)


def _wall(moment: float, era: int) -> int:
    """Unix time in nanoseconds of a time of the monotonic clock."""
    return era + round(moment * 1e9)


def _end(span: Span, ended: int, attributes: Attributes, error: str) -> None:
    span.set_attributes(attributes)
    if error:
        span.set_attribute("error.type", error)
        span.set_status(Status(StatusCode.ERROR))
    span.end(ended)


def _context(parent: TraceParent) -> Context:
    flags = TraceFlags(TraceFlags.SAMPLED if parent.sampled else TraceFlags.DEFAULT)
    remote = SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=flags)
    return set_span_in_context(NonRecordingSpan(remote), Context())
