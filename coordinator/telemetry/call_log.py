"""One gRPC or HTTP call, and the log line at its end.

The API makes a `Call` and ends it. Code in between finds it through `current`, so that the request's id and
its trace need no parameter. The log line holds counts, durations and codes, and no text of the request or the
answer.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from coordinator.requests.observer import RequestRecord
from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.rpc.codec.status import code_name
from paceline.telemetry import logs

if TYPE_CHECKING:
    from coordinator.scheduling.running_sequence import Running

log = logging.getLogger(__name__)

COMPLETION, CHAT = "text_completion", "chat"
"""Operations of a request, by the names of OpenTelemetry's conventions."""
REQUEST_ID: Final = "x-request-id"
"""The header, or gRPC metadata key, that gives a call its id."""
OTHER_FIELD: Final = "other"
"""Stands in the log for a field name that the client invented."""
_GIVEN_ID: Final = re.compile(rf"[\x21-\x7e]{{1,{limits.MAX_REQUEST_ID_CHARACTERS}}}")
_FIELD: Final = re.compile(r"[A-Za-z0-9_.\[\]-]{1,64}")

current: ContextVar[Call | None] = ContextVar("paceline_call", default=None)
"""The call that the current task serves."""


@dataclass(slots=True, eq=False)
class Call:
    """One call from its arrival to its end."""

    face: str
    """`grpc` or `http`."""
    method: str
    """A gRPC method, or an HTTP method and the path of its route."""
    began: float
    traceparent: str = ""
    """The trace context sent by the client."""
    operation: str = COMPLETION
    """Operation of its requests: COMPLETION or CHAT."""
    quiet: bool = False
    """True for calls that machines repeat often: the log line has level DEBUG."""
    context: dict[str, Any] = field(default_factory=dict)
    """Fields of every log line written for this call."""
    requests: list[RequestRecord] = field(default_factory=list)
    """Its requests that have ended."""
    given_id: str = ""
    """The id given by the client; the server's own id is then only the id of the response."""
    refused_field: str = ""
    """The field that the call was refused for, in the client's spelling."""

    def __post_init__(self) -> None:
        """Log the given id from the start."""
        if self.given_id:
            self.context["request_id"] = self.given_id

    def name(self, request_id: str) -> None:
        """Set the id of the call. The first id counts if a call makes several requests."""
        self.context.setdefault("response_id" if self.given_id else "request_id", request_id)

    def made_by(self, tenant: str) -> None:
        """Set the caller, by the name of the API key; empty if the server has no keys."""
        if tenant:
            self.context["tenant"] = tenant

    def refused_for(self, name: str) -> None:
        """Set the field at fault. The first one counts."""
        self.refused_field = self.refused_field or (name if _FIELD.fullmatch(name) else OTHER_FIELD)

    def finish(self, code: str, now: float) -> None:
        """Write the log line; `code` is an HTTP status or the name of a gRPC code."""
        level = logging.DEBUG if self.quiet else logging.INFO
        if not log.isEnabledFor(level):
            return
        about = logs.fields(
            face=self.face, method=self.method, code=code, duration_s=_rounded(now - self.began)
        )
        about["fields"] |= _about_requests(self.requests)
        if self.refused_field:
            about["fields"]["field"] = self.refused_field
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
    stats = [choice.state.stats for choice in choices]
    told |= {
        "prompt_tokens": sum(generation.params.prompt_length for generation in generations),
        "completion_tokens": sum(choice.state.ledger.num_generated for choice in choices),
        "num_rounds": sum(each.num_rounds for each in stats),
        "num_draft_tokens": sum(each.num_draft_tokens for each in stats),
        "num_accepted_draft_tokens": sum(each.num_accepted_draft_tokens for each in stats),
        "finish_reason": [finish_reason(choice) for choice in choices],
        "sequence_id": [choice.state.sequence_id for choice in choices],
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
    """The reason for a sequence's end: `stop`, `length`, `error`, or `abort` if its client went away."""
    finish = running.state.ledger.finish
    if finish is not None:
        return finish.reason.value
    return "error" if running.error is not None else "abort"


def given_id(values: Sequence[str]) -> str:
    """The id that a client gives its call, from the values of its header; empty if there is none.

    Raises InvalidArgumentError naming the header if there are several values, or if the id is too long or has
    characters other than printable ASCII without spaces.
    """
    if not values:
        return ""
    if len(values) > 1 or not _GIVEN_ID.fullmatch(values[0]):
        most = limits.MAX_REQUEST_ID_CHARACTERS
        bounds = f"must be one value of 1 to {most} printable ASCII characters without spaces"
        raise InvalidArgumentError(REQUEST_ID, bounds)
    return values[0]


def made_by(tenant: str) -> None:
    """Set the caller of the current call."""
    if (call := current.get()) is not None:
        call.made_by(tenant)


def refused(error: BaseException) -> None:
    """Set the field at fault of the current call."""
    if isinstance(error, InvalidArgumentError) and (call := current.get()) is not None:
        call.refused_for(error.field)


def _rounded(seconds: float) -> float:
    return round(seconds, 6)


@contextlib.contextmanager
def taking(call: Call) -> Iterator[Call]:
    """Make `call` the current call of this task while the block lasts."""
    current.set(call)
    logs.context.set(call.context)
    try:
        yield call
    finally:
        current.set(None)
        logs.context.set(None)
