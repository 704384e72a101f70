"""Spans through the OpenTelemetry SDK to an OTLP collector over gRPC. Loaded only where traces are wanted."""

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
"""How long one batch may take, retries included."""
CLOSE_SECONDS = 3.0
_READINGS = 3


class _Ids(RandomIdGenerator):
    """Random ids, except where the caller has one for the next span."""

    def __init__(self) -> None:
        self.next_span_id: int | None = None

    def generate_span_id(self) -> int:
        given, self.next_span_id = self.next_span_id, None
        return given if given is not None else super().generate_span_id()


class OtlpSpans:
    """See `Spans`. One thread makes spans; another one, the SDK's, sends them."""

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
        """A server span; None where the sampler does not want it."""
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
        """A span that is over already."""
        self._ids.next_span_id = span_id
        era = self._era()
        span = self._tracer.start_span(name, _context(parent), start_time=_wall(began, era))
        self._ids.next_span_id = None
        _end(span, _wall(ended, era), attributes, error)

    def close(self) -> None:
        """Send what is left. A collector that does not answer does not hold the process up."""
        closing = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)

    def _era(self) -> int:
        """Nanoseconds since 1970 at 0 of the monotonic clock: the reading of both that took least.

        A process that is put aside between the two would see its spans shifted.
        """
        readings = []
        for _ in range(_READINGS):
            before, wall, after = self._clock(), time.time_ns(), self._clock()
            readings.append((after - before, wall - round((before + after) / 2 * 1e9)))
        return min(readings)[1]


class OtlpSpan:
    """See `OpenSpan`."""

    def __init__(self, span: Span, era: int) -> None:
        self._span = span
        self._era = era

    @property
    def parent(self) -> TraceParent:
        """How its children name it."""
        context = self._span.get_span_context()
        return TraceParent(context.trace_id, context.span_id, True)

    def end(self, ended: float, attributes: Attributes, error: str = "") -> None:
        """End it; `error` is a code."""
        _end(self._span, _wall(ended, self._era), attributes, error)


def _wall(moment: float, era: int) -> int:
    """Nanoseconds since 1970 of a moment of the monotonic clock."""
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
