"""Requests and their rounds as spans. Workers add theirs below the rounds (paceline/telemetry/worker.py).

Names follow OpenTelemetry's conventions for generative AI where they exist, and vLLM's for latencies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.requests.observer import RequestRecord
from coordinator.sequence.round_record import PROMPT_LOOKUP, RoundRecord
from coordinator.telemetry import call_log
from paceline.rpc.codec.status import code_name
from paceline.telemetry.span_interface import Attributes, OpenSpan, Spans, Value
from paceline.telemetry.traceparent import parse, round_span_id

if TYPE_CHECKING:
    from coordinator.scheduling.running_sequence import Running

_SAMPLING = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "n": "gen_ai.request.choice.count",
}
"""Sampling parameters in a span. Stop strings and biases are left out: they hold the client's text."""


class Tracer:
    """An observer that makes spans."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._open: dict[str, OpenSpan] = {}
        """Spans of running requests, by their traceparent."""

    def request_began(self, request: RequestRecord) -> None:
        """Begin the request's span, in the client's trace."""
        call = call_log.current.get()
        parent = parse(call.traceparent) if call is not None and call.traceparent else None
        span = self._spans.begin(f"{request.operation} {request.model}".strip(), parent, request.began)
        if span is not None:
            request.traceparent = str(span.parent)
            self._open[request.traceparent] = span

    def request_ended(self, request: RequestRecord) -> None:
        """End the request's span."""
        span = self._open.pop(request.traceparent, None)
        if span is not None:
            error = "" if request.error is None else code_name(request.error)
            span.end(request.ended, _about(request), error)

    def round_ended(self, running: Running, record: RoundRecord, now: float) -> None:
        """Add a span for a committed round."""
        if not running.state.params.traceparent:
            return
        attributes: dict[str, Value] = {
            "paceline.num_draft_tokens": record.num_draft,
            "paceline.num_accepted_tokens": record.num_accepted,
            "paceline.num_committed_tokens": record.num_tokens,
            "paceline.lookahead_hit": record.hit,
            "paceline.source": record.proposed_by if record.num_draft else "",
            "paceline.prompt_lookup": record.source == PROMPT_LOOKUP,
            "paceline.prefill": record.prefills,
            "paceline.verify_seconds": record.verify_waited,
            "paceline.commit_seconds": now - record.ended,
        }
        if record.draft is not None:
            attributes["paceline.draft_seconds"] = record.draft_waited
        self._round(running, record, now, attributes)

    def sequence_ended(self, running: Running, now: float) -> None:
        """Add a span for the unfinished round, since workers may have sent spans below it."""
        record = running.state.unfinished
        if record is not None and running.state.params.traceparent:
            error = "" if running.error is None else code_name(running.error)
            self._round(running, record, now, {"paceline.num_committed_tokens": 0}, error)

    def _round(
        self, running: Running, record: RoundRecord, now: float, about: Attributes, error: str = ""
    ) -> None:
        machine = running.machine
        request = parse(machine.state.params.traceparent)
        assert request is not None
        attributes: Attributes = {
            "paceline.sequence_id": machine.state.sequence_id,
            "paceline.choice": machine.state.ledger.choice,
            "paceline.round": record.number,
            **about,
        }
        # A round that the target begins by itself begins there before this process knows of it.
        began = record.began if record.target_since is None else min(record.began, record.target_since)
        span_id = round_span_id(request, machine.state.sequence_id, record.number)
        self._spans.record("round", request, began, now, attributes, span_id=span_id, error=error)

    def worker_lost(self, role: str) -> None:
        """Nothing: the length of the round's span shows it."""

    def blocks_awaited(self) -> None:
        """Nothing: the length of the round's span shows it."""


def _about(request: RequestRecord) -> Attributes:
    sampling = request.call.sampling
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": "paceline",
        "gen_ai.request.model": request.model,
        "gen_ai.response.model": request.model,
        "gen_ai.latency.e2e": request.ended - request.began,
    }
    if request.request_id:
        attributes["gen_ai.response.id"] = request.request_id
    if request.tenant:
        attributes["paceline.tenant"] = request.tenant
    if (call := call_log.current.get()) is not None and call.given_id:
        attributes["paceline.request_id"] = call.given_id
    for name, attribute in _SAMPLING.items():
        value = getattr(sampling, name)
        if value is not None:
            attributes[attribute] = value
    generation = request.generation
    if generation is None:
        return attributes
    ledgers = [machine.state.ledger for machine in generation.machines]
    stats = [machine.state.stats for machine in generation.machines]
    attributes |= {
        "gen_ai.usage.input_tokens": generation.params.prompt_length,
        "gen_ai.usage.output_tokens": sum(ledger.num_generated for ledger in ledgers),
        "gen_ai.response.finish_reasons": [call_log.finish_reason(choice) for choice in generation.choices],
        "paceline.acceptance": generation.params.mode.value,
        "paceline.num_rounds": sum(each.num_rounds for each in stats),
        "paceline.num_draft_tokens": sum(each.num_draft_tokens for each in stats),
        "paceline.num_accepted_tokens": sum(each.num_accepted_draft_tokens for each in stats),
    }
    first = generation.choices[0]
    if first.admitted_at is not None:
        attributes["gen_ai.latency.time_in_queue"] = first.admitted_at - first.arrived_at
    if first.first_token_at is not None:
        waited = first.first_token_at - first.arrived_at
        attributes["gen_ai.latency.time_to_first_token"] = waited
        attributes["gen_ai.response.time_to_first_chunk"] = waited
    return attributes
