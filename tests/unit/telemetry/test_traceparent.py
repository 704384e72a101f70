"""Trace contexts, against OpenTelemetry's own parser."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from paceline.telemetry.traceparent import TraceParent, parse, round_span_id

PARENTS = st.builds(TraceParent, st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())


def theirs(text: str) -> TraceParent | None:
    found = TraceContextTextMapPropagator().extract({"traceparent": text})
    context = trace.get_current_span(found).get_span_context()
    if not context.is_valid:
        return None
    return TraceParent(context.trace_id, context.span_id, context.trace_flags.sampled)


@given(PARENTS)
def test_a_trace_context_round_trips_like_opentelemetrys(parent: TraceParent) -> None:
    assert parse(str(parent)) == theirs(str(parent)) == parent


T, S = "1" * 32, "2" * 16


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        f"00-{T}-{S}-01",
        f"00-{T}-{S}-00",
        f"00-{T}-{S}-ff",
        f"00-{T}-{S}-01-more",
        f"01-{T}-{S}-01-more",
        f"01-{T}-{S}-01",
        f"ff-{T}-{S}-01",
        f"00-{'0' * 32}-{S}-01",
        f"00-{T}-{'0' * 16}-01",
        f"00-{T[:-1]}-{S}-01",
        f"00-{'G' * 32}-{S}-01",
        f"00-{'A' * 32}-{S}-01",
    ],
)
def test_trace_contexts_are_parsed_like_opentelemetry(text: str) -> None:
    assert parse(text) == theirs(text)


@given(PARENTS, st.text(max_size=30), st.integers(1, 2**31))
def test_the_ids_of_rounds_are_valid_and_differ(parent: TraceParent, name: str, number: int) -> None:
    ids = {
        round_span_id(parent, name, number),
        round_span_id(parent, name, number + 1),
        round_span_id(parent, name + "x", number),
    }
    assert len(ids) == 3
    assert all(0 < span_id < 2**64 for span_id in ids)
    other = TraceParent(parent.trace_id, parent.span_id, not parent.sampled)
    assert round_span_id(other, name, number) == round_span_id(parent, name, number)
