"""Optional tracing. OpenTelemetry is imported only if an endpoint is configured."""

from __future__ import annotations

from paceline.core.errors import InvalidArgumentError
from paceline.telemetry.span_interface import Spans


def make_spans(role: str, endpoint: str, sampling_ratio: float = 1.0) -> Spans | None:
    """The span exporter; None without an endpoint. Raises InvalidArgumentError without OpenTelemetry."""
    if not endpoint:
        return None
    try:
        from paceline.telemetry.spans import OtlpSpans
    except ModuleNotFoundError as error:
        raise InvalidArgumentError(
            "otlp_traces_endpoint", f"requires the module {error.name}: install paceline[otel]"
        ) from None
    return OtlpSpans(f"paceline-{role}", endpoint, sampling_ratio)
