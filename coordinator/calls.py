"""One call of a face, gRPC or HTTP, and the line that is logged at its end.

The face makes a `Call` and ends it; what happens meanwhile finds it through `current`, so that a request's
id and the trace it belongs to need no parameter on the way. A call's line holds counts, durations and
codes, and nothing of what was asked or answered.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coordinator.observer import RequestRecord
from paceline.rpc.status import code_name
from paceline.telemetry import logs

if TYPE_CHECKING:
    from coordinator.running import Running

log = logging.getLogger(__name__)

COMPLETION, CHAT = "text_completion", "chat"
"""What a request does, by the names of OpenTelemetry's conventions."""

current: ContextVar[Call | None] = ContextVar("paceline_call", default=None)
"""The call on whose behalf this task runs."""


@dataclass(slots=True, eq=False)
class Call:
    """One call from its arrival to its end."""

    face: str
    """`grpc` or `http`."""
    method: str
    """A gRPC method, or an HTTP method and the path of its route."""
    began: float
    traceparent: str = ""
    """What the client sent."""
    operation: str = COMPLETION
    """Of its requests: COMPLETION or CHAT."""
    quiet: bool = False
    """Asked for again and again by machines: its line is of level DEBUG."""
    context: dict[str, Any] = field(default_factory=dict)
    """Fields of every log line that is written on its behalf."""
    requests: list[RequestRecord] = field(default_factory=list)
    """Those it made, ended ones only."""

    def name(self, request_id: str) -> None:
        """Its id; the first one counts, where a call makes several requests."""
        self.context.setdefault("request_id", request_id)

    def finish(self, code: str, now: float) -> None:
        """Write its line; `code` is an HTTP status or the name of a gRPC code."""
        level = logging.DEBUG if self.quiet else logging.INFO
        if not log.isEnabledFor(level):
            return
        about = logs.fields(
            face=self.face, method=self.method, code=code, duration_s=_rounded(now - self.began)
        )
        about["fields"] |= _about_requests(self.requests)
        log.log(level, "call ended", extra=about)


def _about_requests(requests: list[RequestRecord]) -> dict[str, Any]:
    if not requests:
        return {}
    told: dict[str, Any] = {"model": requests[0].model}
    errors = [code_name(request.error) for request in requests if request.error is not None]
    if errors:
        told["error"] = errors[0]
    generations = [request.generation for request in requests if request.generation is not None]
    if not generations:
        return told
    choices = [choice for generation in generations for choice in generation.choices]
    stats = [choice.machine.stats for choice in choices]
    told |= {
        "prompt_tokens": sum(generation.params.prompt_length for generation in generations),
        "completion_tokens": sum(choice.machine.ledger.num_generated for choice in choices),
        "num_rounds": sum(each.num_rounds for each in stats),
        "num_draft_tokens": sum(each.num_draft_tokens for each in stats),
        "num_accepted_draft_tokens": sum(each.num_accepted_draft_tokens for each in stats),
        "finish_reason": [finish_reason(choice) for choice in choices],
        "sequence_id": [choice.machine.sequence_id for choice in choices],
    }
    first = choices[0]
    if first.admitted_at is not None:
        told["queue_s"] = _rounded(first.admitted_at - first.arrived_at)
    if first.first_token_at is not None:
        told["first_token_s"] = _rounded(first.first_token_at - first.arrived_at)
    traced = next((request.traceparent for request in requests if request.traceparent), "")
    if traced:
        told["trace_id"] = traced.split("-")[1]
    return told


def finish_reason(running: Running) -> str:
    """Why a sequence ended: `stop`, `length`, `error`, or `abort` when its client went away."""
    finish = running.machine.ledger.finish
    if finish is not None:
        return finish.reason.value
    return "error" if running.error is not None else "abort"


def _rounded(seconds: float) -> float:
    return round(seconds, 6)


@contextlib.contextmanager
def taking(call: Call) -> Iterator[Call]:
    """Let everything that this task does know its call."""
    current.set(call)
    logs.context.set(call.context)
    try:
        yield call
    finally:
        current.set(None)
        logs.context.set(None)
