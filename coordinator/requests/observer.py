"""The record of one request, and the protocol of those that observe requests and their sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from coordinator.requests.generation import Generation
from coordinator.scheduling.observer import SequenceObserver
from paceline.core.errors import PacelineError
from paceline.rpc.codec import GenerateCall


@dataclass(slots=True)
class RequestRecord:
    """One request from its arrival to its end. Times are seconds of the coordinator's clock."""

    call: GenerateCall
    model: str
    began: float
    operation: str = "text_completion"
    """Operation name in OpenTelemetry's conventions (calls.py)."""
    ended: float = 0.0
    request_id: str = ""
    """Empty if the request was refused before it had an id."""
    traceparent: str = ""
    """Trace context of the request's span, for the workers; empty if the request is not traced."""
    generation: Generation | None = None
    """None if the request was refused."""
    tenant: str = ""
    """Name of the API key of the request; empty if the server has no keys."""
    error: PacelineError | None = None
    """The error that ended the request early; CancelledError if its client went away."""


class Observer(SequenceObserver, Protocol):
    """Notified of requests by the coordinator and of their sequences by the dispatcher, on the event loop.

    An exception raised by an observer is logged.
    """

    def request_began(self, request: RequestRecord) -> None:
        """A request arrived. Nothing in it has been checked against the model."""

    def request_ended(self, request: RequestRecord) -> None:
        """A request ended, with or without an error."""
