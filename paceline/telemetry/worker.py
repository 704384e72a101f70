"""A worker's counters and spans. No I/O; a few numbers per pass."""

from __future__ import annotations

from paceline.core.types import Timings
from paceline.telemetry import histogram
from paceline.telemetry.histogram import Histogram
from paceline.telemetry.span_interface import Attributes, Spans
from paceline.telemetry.traceparent import TraceParent, parse, round_span_id

KINDS = ("rounds", "ahead")
"""Purpose of a pass: requested rounds, or work in advance (a draft's branches and prompts read ahead, a
target's precomputed rows)."""


class Passes:
    """Histograms of the passes of one kind."""

    __slots__ = ("rows", "seconds", "sequences")

    def __init__(self) -> None:
        self.rows = Histogram(histogram.SMALL_COUNTS)
        self.sequences = Histogram(histogram.SMALL_COUNTS)
        self.seconds = Histogram(histogram.FAST_SECONDS)

    def ran(self, rows: int, sequences: int, seconds: float) -> None:
        """Count one completed pass."""
        self.rows.observe(rows)
        self.sequences.observe(sequences)
        self.seconds.observe(seconds)


def timings_told(timings: Timings) -> Attributes:
    """An answer's timings as span attributes."""
    return {
        "paceline.queue_seconds": timings.queue,
        "paceline.compute_seconds": timings.compute,
        "paceline.pass_rows": timings.rows,
        "paceline.pass_sequences": timings.sequences,
        "paceline.prefill_seconds": timings.prefill,
        "paceline.pass_prefill_rows": timings.prefill_rows,
    }


class WorkerObserver:
    """Collects passes and answers of the engine thread; other threads may read the numbers."""

    def __init__(self, span_name: str = "", spans: Spans | None = None) -> None:
        self.passes = {kind: Passes() for kind in KINDS}
        self._span_name = span_name
        self._spans = spans

    def answered(
        self,
        traceparent: str,
        sequence_id: str,
        round_number: int,
        began: float,
        ended: float,
        attributes: Attributes,
        error: str = "",
    ) -> None:
        """Record the answer to a round of a traced sequence as a child of the round's span."""
        request = parse(traceparent)
        if self._spans is None or request is None or not request.sampled:
            return
        span_id = round_span_id(request, sequence_id, round_number)
        known: Attributes = {"paceline.sequence_id": sequence_id, "paceline.round": round_number}
        parent = TraceParent(request.trace_id, span_id, True)
        self._spans.record(self._span_name, parent, began, ended, {**known, **attributes}, error=error)
