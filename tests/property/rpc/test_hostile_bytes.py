"""Any bytes become a value, a DecodeError or an InvalidArgumentError."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import InvalidArgumentError, PacelineError
from paceline.rpc import codec
from paceline.rpc.codec.status import from_status, to_status
from paceline.rpc.streams import frames
from paceline.v1 import common_pb2, draft_pb2, generation_pb2, target_pb2
from tests.property.rpc import wire

few = settings(max_examples=60, deadline=None)
PARSERS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "sampling": (common_pb2.SamplingParams, codec.sampling_from_proto),
    "speculation": (generation_pb2.SpeculationParams, codec.speculation_from_proto),
    "generate request": (generation_pb2.GenerateRequest, codec.generate_request_from_proto),
    "sequence params": (common_pb2.SequenceParams, codec.sequence_params_from_proto),
    "proposal": (common_pb2.Proposal, codec.proposal_from_proto),
    "verdict": (target_pb2.Verdict, codec.verdict_from_proto),
    "timings": (common_pb2.Timings, codec.timings_from_proto),
    "target commands": (target_pb2.VerifyRequest, frames.target_commands),
    "draft commands": (draft_pb2.DraftRequest, frames.draft_commands),
    "target events": (target_pb2.VerifyResponse, frames.target_events),
    "draft events": (draft_pb2.DraftResponse, frames.draft_events),
}


def accept_or_refuse(kind: str, payload: bytes) -> None:
    message, parse = PARSERS[kind]
    with contextlib.suppress(DecodeError, InvalidArgumentError):
        parse(message.FromString(payload))


def mutated(data: Any, payload: bytes) -> bytes:
    """`payload` with a few bytes replaced, inserted or cut: it gets deeper than noise does."""
    changed = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(changed)))
        changed[position : position + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    return bytes(changed)


@pytest.mark.parametrize("kind", PARSERS)
@few
@given(payload=st.binary(max_size=120))
def test_random_bytes_are_parsed_or_refused(kind: str, payload: bytes) -> None:
    accept_or_refuse(kind, payload)


RENDERED: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], Any]]] = {
    "generate request": (wire.calls, codec.generate_request_to_proto),
    "target commands": (wire.target_commands, frames.verify_request),
    "draft commands": (wire.draft_commands, frames.draft_request),
    "target events": (wire.target_events, frames.verify_response),
    "draft events": (wire.draft_events, frames.draft_response),
}


@pytest.mark.parametrize("kind", RENDERED)
@few
@given(data=st.data())
def test_a_mutated_message_is_parsed_or_refused(data: Any, kind: str) -> None:
    values, render = RENDERED[kind]
    accept_or_refuse(kind, mutated(data, render(data.draw(values)).SerializeToString()))


@few
@given(payload=st.binary(max_size=120), error=wire.paceline_errors, data=st.data())
def test_any_status_is_an_error(payload: bytes, error: PacelineError, data: Any) -> None:
    for received in (payload, mutated(data, to_status(error).SerializeToString())):
        with contextlib.suppress(DecodeError):
            assert isinstance(from_status(status_pb2.Status.FromString(received)), PacelineError)
