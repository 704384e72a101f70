"""What spans are, for those who make and use them without OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from paceline.telemetry.traceparent import TraceParent

Value = str | bool | int | float | list[str]
Attributes = Mapping[str, Value]
"""What a span says; never a prompt, an output or a token id."""


class OpenSpan(Protocol):
    """A span that has begun and is recorded."""

    @property
    def parent(self) -> TraceParent:
        """How its children name it."""

    def end(self, ended: float, attributes: Attributes, error: str = "") -> None:
        """End it, at a moment of the process's clock; `error` is a code."""


class Spans(Protocol):
    """Makes spans and sends them away. Moments are those of the process's monotonic clock."""

    def begin(self, name: str, parent: TraceParent | None, began: float) -> OpenSpan | None:
        """A span that serves a call; None where the call is not sampled."""

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
        """A span that is over already, with an id of the caller's if there is one."""

    def close(self) -> None:
        """Send what is left, for a few seconds at most."""
