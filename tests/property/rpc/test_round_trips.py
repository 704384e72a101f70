"""Every pair of codec functions round-trips through bytes."""

from __future__ import annotations

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

few = settings(max_examples=60, deadline=None)
M = TypeVar("M", bound=Message)


def over_the_wire(message: M) -> M:
    return type(message).FromString(message.SerializeToString())


@few
@given(data=st.data())
def test_sampling_round_trips(wire: Any, data: Any) -> None:
    params = data.draw(wire.samplings)
    assert codec.sampling_from_proto(over_the_wire(codec.sampling_to_proto(params))) == params


@few
@given(data=st.data())
def test_speculation_round_trips(wire: Any, data: Any) -> None:
    params = data.draw(wire.speculations)
    assert codec.speculation_from_proto(over_the_wire(codec.speculation_to_proto(params))) == params


@few
@given(data=st.data())
def test_generate_request_round_trips(wire: Any, data: Any) -> None:
    call = data.draw(wire.calls)
    assert codec.generate_request_from_proto(over_the_wire(codec.generate_request_to_proto(call))) == call


@few
@given(data=st.data())
def test_sequence_params_round_trip(wire: Any, data: Any) -> None:
    params = data.draw(wire.sequence_params)
    assert codec.sequence_params_from_proto(over_the_wire(codec.sequence_params_to_proto(params))) == params


@few
@given(data=st.data())
def test_proposal_round_trips(wire: Any, data: Any) -> None:
    proposal = data.draw(wire.proposals)
    assert codec.proposal_from_proto(over_the_wire(codec.proposal_to_proto(proposal))) == proposal


@few
@given(data=st.data())
def test_verdict_round_trips(wire: Any, data: Any) -> None:
    verdict = data.draw(wire.verdicts)
    message = over_the_wire(codec.verdict_to_proto("s", 1, 2, verdict))
    assert codec.verdict_from_proto(message) == verdict
    assert (message.sequence_id, message.epoch, message.round) == ("s", 1, 2)


@few
@given(data=st.data())
def test_timings_round_trip(wire: Any, data: Any) -> None:
    timings = data.draw(wire.timings)
    assert codec.timings_from_proto(over_the_wire(codec.timings_to_proto(timings))) == timings


@few
@given(data=st.data())
def test_draft_proposal_round_trips(wire: Any, data: Any) -> None:
    proposal, timings = data.draw(wire.proposals), data.draw(wire.timings)
    message = over_the_wire(codec.draft_proposal_to_proto("s", 1, 2, 30, proposal, 34, timings))
    assert codec.proposal_from_proto(message.proposal) == proposal
    assert codec.timings_from_proto(message.timings) == timings
    assert (message.sequence_id, message.epoch, message.round) == ("s", 1, 2)
    assert (message.base_length, message.num_computed_tokens) == (30, 34)


@pytest.mark.parametrize("mode", AcceptanceMode)
def test_mode_round_trips(mode: AcceptanceMode) -> None:
    assert codec.mode_from_proto(codec.mode_to_proto(mode)) is mode


@pytest.mark.parametrize("origin", TokenOrigin)
def test_origin_round_trips(origin: TokenOrigin) -> None:
    assert codec.origin_from_proto(codec.origin_to_proto(origin)) is origin


@pytest.mark.parametrize("reason", FinishReason)
def test_finish_reason_round_trips(reason: FinishReason) -> None:
    assert codec.finish_reason_from_proto(codec.finish_reason_to_proto(reason)) is reason


@few
@given(data=st.data())
def test_target_commands_round_trip(wire: Any, data: Any) -> None:
    commands = data.draw(wire.target_commands)
    assert frames.target_commands(over_the_wire(frames.verify_request(commands))) == commands


@few
@given(data=st.data())
def test_draft_commands_round_trip(wire: Any, data: Any) -> None:
    commands = data.draw(wire.draft_commands)
    assert frames.draft_commands(over_the_wire(frames.draft_request(commands))) == commands


@pytest.mark.parametrize(
    ("events", "render", "parse"),
    [
        ("target_events", frames.verify_response, frames.target_events),
        ("draft_events", frames.draft_response, frames.draft_events),
    ],
)
@few
@given(data=st.data())
def test_events_round_trip(wire: Any, data: Any, events: str, render: Any, parse: Any) -> None:
    sent = data.draw(getattr(wire, events))
    heard = parse(over_the_wire(render(sent)))
    assert len(heard) == len(sent)
    for a, b in zip(sent, heard, strict=True):
        if isinstance(a, SequenceFailed):
            assert (a.sequence_id, a.epoch, a.round) == (b.sequence_id, b.epoch, b.round)
            assert wire.same_error(a.error, b.error)
        else:
            assert a == b


@few
@given(data=st.data())
def test_errors_round_trip(wire: Any, data: Any) -> None:
    error = data.draw(wire.errors)
    back = from_status(over_the_wire(to_status(error)), getattr(error, "known_length", 0))
    assert wire.same_error(back, error)
