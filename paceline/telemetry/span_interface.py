"""The interface of spans, independent of OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from paceline.telemetry.traceparent import TraceParent

Value = str | bool | int | float | list[str]
Attributes = Mapping[str, Value]
"""Attributes of a span; never a prompt, an output or a token id."""


class OpenSpan(Protocol):
    """A recorded span that has not ended."""

    @property
    def parent(self) -> TraceParent:
        """The reference for child spans."""

    def end(self, ended: float, attributes: Attributes, error: str = "") -> None:
        """End the span at a time of the monotonic clock; `error` is a code."""


class Spans(Protocol):
    """Creates and exports spans. Times are those of the process's monotonic clock."""

    def begin(self, name: str, parent: TraceParent | None, began: float) -> OpenSpan | None:
        """Begin a server span; None if the call is not sampled."""

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
        """Record a completed span, optionally with a given id."""

    def close(self) -> None:
        """Export the remaining spans, for a few seconds at most."""
