"""What is recorded of one request, and who is told of requests and their sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from coordinator.requests.generation import Generation
from coordinator.scheduling.observer import SequenceObserver
from paceline.core.errors import PacelineError
from paceline.rpc.codec import GenerateCall


@dataclass(slots=True)
class RequestRecord:
    """One request from its arrival to its end. Moments are of the coordinator's clock, in seconds."""

    call: GenerateCall
    model: str
    began: float
    operation: str = "text_completion"
    """Its name by OpenTelemetry's conventions (calls.py)."""
    ended: float = 0.0
    request_id: str = ""
    """Empty for one that was refused before it had one."""
    traceparent: str = ""
    """Of its span, for the workers; empty when it is not traced."""
    generation: Generation | None = None
    """None for one that was refused."""
    tenant: str = ""
    """The name of the API key that it came with; empty where there are no keys."""
    error: PacelineError | None = None
    """What ended it before it was whole; CancelledError when its client went away."""


class Observer(SequenceObserver, Protocol):
    """Told of requests by the coordinator and of their sequences by the dispatcher, on the event loop.

    An exception that it raises is logged.
    """

    def request_began(self, request: RequestRecord) -> None:
        """A request arrived; nothing of it has been checked against the model."""

    def request_ended(self, request: RequestRecord) -> None:
        """A request ended, however."""
