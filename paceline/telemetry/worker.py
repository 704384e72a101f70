"""What a worker keeps of its own work for metrics and spans. Pure, and cheap: plain numbers a pass."""

from __future__ import annotations

from paceline.core.types import Timings
from paceline.telemetry import histogram
from paceline.telemetry.histogram import Histogram
from paceline.telemetry.span_interface import Attributes, Spans
from paceline.telemetry.traceparent import TraceParent, parse, round_span_id

KINDS = ("rounds", "ahead")
"""What a pass was for: rounds that were asked for, or what nobody has asked for yet: a draft's branches and
the prompts that it reads beside the target, a target's first rows."""


class Passes:
    """Passes of the model, of one kind."""

    __slots__ = ("rows", "seconds", "sequences")

    def __init__(self) -> None:
        self.rows = Histogram(histogram.SMALL_COUNTS)
        self.sequences = Histogram(histogram.SMALL_COUNTS)
        self.seconds = Histogram(histogram.FAST_SECONDS)

    def ran(self, rows: int, sequences: int, seconds: float) -> None:
        """One pass is over."""
        self.rows.observe(rows)
        self.sequences.observe(sequences)
        self.seconds.observe(seconds)


def timings_told(timings: Timings) -> Attributes:
    """Where an answer's time went, as its span says it."""
    return {
        "paceline.queue_seconds": timings.queue,
        "paceline.compute_seconds": timings.compute,
        "paceline.pass_rows": timings.rows,
        "paceline.pass_sequences": timings.sequences,
        "paceline.prefill_seconds": timings.prefill,
        "paceline.pass_prefill_rows": timings.prefill_rows,
    }


class WorkerObserver:
    """Told of passes and answers by the engine thread; another thread may read the numbers."""

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
        """A round of a traced sequence was answered: a span below that of the round."""
        request = parse(traceparent)
        if self._spans is None or request is None or not request.sampled:
            return
        span_id = round_span_id(request, sequence_id, round_number)
        known: Attributes = {"paceline.sequence_id": sequence_id, "paceline.round": round_number}
        parent = TraceParent(request.trace_id, span_id, True)
        self._spans.record(self._span_name, parent, began, ended, {**known, **attributes}, error=error)
