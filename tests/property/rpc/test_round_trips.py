"""Every pair of codec functions round-trips through bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.messages import SequenceFailed
from paceline.core.types import AcceptanceMode, FinishReason, TokenOrigin
from paceline.rpc import codec
from paceline.rpc.codec.status import from_status, to_status
from paceline.rpc.streams import frames
from tests.property.rpc import wire

few = settings(max_examples=60, deadline=None)
M = TypeVar("M", bound=Message)
PAIRS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "sampling": (wire.samplings(), codec.sampling_to_proto, codec.sampling_from_proto),
    "speculation": (wire.speculations, codec.speculation_to_proto, codec.speculation_from_proto),
    "a request": (wire.calls, codec.generate_request_to_proto, codec.generate_request_from_proto),
    "a sequence": (wire.sequence_params(), codec.sequence_params_to_proto, codec.sequence_params_from_proto),
    "a proposal": (wire.proposals(), codec.proposal_to_proto, codec.proposal_from_proto),
    "timings": (wire.timings, codec.timings_to_proto, codec.timings_from_proto),
    "target commands": (wire.target_commands, frames.verify_request, frames.target_commands),
    "draft commands": (wire.draft_commands, frames.draft_request, frames.draft_commands),
}


def over_the_wire(message: M) -> M:
    return type(message).FromString(message.SerializeToString())


@pytest.mark.parametrize("kind", PAIRS)
@few
@given(data=st.data())
def test_values_round_trip(kind: str, data: Any) -> None:
    values, render, parse = PAIRS[kind]
    value = data.draw(values)
    assert parse(over_the_wire(render(value))) == value


@few
@given(wire.verdicts())
def test_verdict_round_trips(verdict: Any) -> None:
    message = over_the_wire(codec.verdict_to_proto("s", 1, 2, verdict))
    assert codec.verdict_from_proto(message) == verdict
    assert (message.sequence_id, message.epoch, message.round) == ("s", 1, 2)


@few
@given(wire.proposals(), wire.timings)
def test_draft_proposal_round_trips(proposal: Any, timings: Any) -> None:
    message = over_the_wire(codec.draft_proposal_to_proto("s", 1, 2, 30, proposal, 34, timings))
    assert codec.proposal_from_proto(message.proposal) == proposal
    assert codec.timings_from_proto(message.timings) == timings
    assert (message.sequence_id, message.epoch, message.round) == ("s", 1, 2)
    assert (message.base_length, message.num_computed_tokens) == (30, 34)


@pytest.mark.parametrize(
    ("kind", "name"), [(AcceptanceMode, "mode"), (TokenOrigin, "origin"), (FinishReason, "finish_reason")]
)
def test_enums_round_trip(kind: Any, name: str) -> None:
    render, parse = getattr(codec, f"{name}_to_proto"), getattr(codec, f"{name}_from_proto")
    assert [parse(render(value)) for value in kind] == list(kind)


@pytest.mark.parametrize(
    ("events", "render", "parse"),
    [
        (wire.target_events, frames.verify_response, frames.target_events),
        (wire.draft_events, frames.draft_response, frames.draft_events),
    ],
    ids=["target", "draft"],
)
@few
@given(data=st.data())
def test_events_round_trip(data: Any, events: Any, render: Any, parse: Any) -> None:
    sent = data.draw(events)
    for a, b in zip(sent, parse(over_the_wire(render(sent))), strict=True):
        if isinstance(a, SequenceFailed):
            assert (a.sequence_id, a.epoch, a.round) == (b.sequence_id, b.epoch, b.round)
            assert wire.same_error(a.error, b.error)
        else:
            assert a == b


@few
@given(wire.paceline_errors)
def test_errors_round_trip(error: Any) -> None:
    back = from_status(over_the_wire(to_status(error)), getattr(error, "known_length", 0))
    assert wire.same_error(back, error)
