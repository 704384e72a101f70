"""Spans for whoever asks for them. A process that is not asked loads nothing of OpenTelemetry."""

from __future__ import annotations

from paceline.core.errors import InvalidArgumentError
from paceline.telemetry.span_interface import Spans


def make_spans(role: str, endpoint: str, sampling_ratio: float = 1.0) -> Spans | None:
    """None without an endpoint. Raises InvalidArgumentError when OpenTelemetry is not installed."""
    if not endpoint:
        return None
    try:
        from paceline.telemetry.spans import OtlpSpans
    except ModuleNotFoundError as error:
        raise InvalidArgumentError(
            "otlp_traces_endpoint", f"needs the module {error.name}: install paceline with its extra `otel`"
        ) from None
    return OtlpSpans(f"paceline-{role}", endpoint, sampling_ratio)
