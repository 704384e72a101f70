"""Frames of commands and events: split in order; what a newer or excessive sender says fails one sequence."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.core.messages import (
    CloseSequence,
    Continuations,
    DraftRound,
    OpenSequence,
    SequenceFailed,
    VerifyAhead,
    VerifyRound,
)
from paceline.core.types import AcceptanceMode, Outcome, Proposal, SamplingParams, SequenceParams
from paceline.rpc.streams import frames
from paceline.rpc.streams.frame_split import framed

LENGTHS = st.lists(st.integers(1, limits.MAX_SEQUENCE_ID_CHARACTERS), min_size=1, max_size=30)


@given(LENGTHS, st.integers(1, 400), st.integers(1, 10))
@settings(max_examples=200, deadline=None)
def test_commands_arrive_in_order_in_bounded_messages(lengths: list[int], most_bytes: int, most: int) -> None:
    commands = [CloseSequence("x" * length, i) for i, length in enumerate(lengths)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "MAX_MESSAGE_BYTES", most_bytes)
        patch.setattr(limits, "MAX_COMMANDS_PER_FRAME", most)
        messages = list(framed(commands, frames.verify_request))
        told = [frames.target_commands(message) for message in messages]
    assert [command for each in told for command in each] == commands
    for message, each in zip(messages, told, strict=True):
        assert len(each) == 1 or message.ByteSize() <= most_bytes


def test_commands_that_fit_are_one_message() -> None:
    commands = [CloseSequence("s", i) for i in range(100)]
    (message,) = framed(commands, frames.verify_request)
    assert frames.target_commands(message) == commands


FIELD = 100
OPEN = OpenSequence("s", 1, (1, 2), SequenceParams(SamplingParams(seed=1), AcceptanceMode.BLOCK, 2))
AHEAD = VerifyAhead("s", 1, 2, 3, {Outcome(0, 5): Proposal((6, 7))})
FORESEEN = Continuations("s", 1, 2, 3, {Outcome(0, 5): Proposal((6, 7))})
TARGET = frames.verify_request, frames.target_commands
DRAFT = frames.draft_request, frames.draft_commands
EVENTS = frames.draft_response, frames.draft_events


def with_more(message: Message) -> None:
    """One varint field more, in place."""
    message.MergeFromString(bytes([FIELD << 3 & 127 | 128, FIELD << 3 >> 7, 1]))


def refusal_of(failed: Any, sequence_id: str, field: str) -> InvalidArgumentError:
    assert isinstance(failed, SequenceFailed)
    assert (failed.sequence_id, failed.epoch) == (sequence_id, 1)
    assert isinstance(failed.error, InvalidArgumentError)
    assert failed.error.field == field
    return failed.error


@pytest.mark.parametrize(
    ("dialect", "command", "path", "field"),
    [
        (TARGET, OPEN, ("open_sequence",), "open_sequence"),
        (TARGET, VerifyRound("s", 1, 2, 3, (), Proposal((6,))), ("verify_round",), "verify_round"),
        (TARGET, AHEAD, ("verify_ahead",), "verify_ahead"),
        (TARGET, AHEAD, ("verify_ahead", "continuations"), "continuations"),
        (DRAFT, OPEN, ("open_sequence",), "open_sequence"),
        (DRAFT, DraftRound("s", 1, 2, 3, (), 4), ("draft_round",), "draft_round"),
        (EVENTS, FORESEEN, ("continuations", "continuations"), "continuations"),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) and isinstance(value[0], str) else "",
)
def test_a_newer_senders_field_fails_only_its_sequence(
    dialect: Any, command: Any, path: tuple[str, ...], field: str
) -> None:
    """In every message of a frame."""
    render, parse = dialect
    frame = render([command, command])
    assert parse(frame) == [command, command]
    message = (frame.events if dialect is EVENTS else frame.commands)[0]
    for name in path:
        message = getattr(message, name)
        message = message[0] if not isinstance(message, Message) else message
    with_more(message)
    failed, intact = parse(frame)
    assert str(FIELD) in refusal_of(failed, "s", field).message
    assert intact == command


@pytest.mark.parametrize("dialect", [TARGET, DRAFT], ids=["target", "draft"])
def test_a_sequence_is_closed_despite_unknown_fields(dialect: Any) -> None:
    """Otherwise it would keep its blocks."""
    render, parse = dialect
    closing = CloseSequence("s", 1)
    frame = render([closing])
    with_more(frame.commands[0].close_sequence)
    assert parse(frame) == [closing]


@pytest.mark.parametrize(
    ("kind", "dialect"),
    [(VerifyAhead, TARGET), (Continuations, EVENTS)],
    ids=["verify ahead", "continuations"],
)
def test_too_many_continuations_fail_only_their_sequence(kind: Any, dialect: Any) -> None:
    """More for one sequence than a message may hold."""
    render, parse = dialect
    most = {Outcome(0, token): Proposal((5, 6)) for token in range(limits.MAX_CONTINUATIONS)}
    many = kind("a", 1, 2, 30, {**most, Outcome(1, 0): Proposal((5, 6))})
    neighbour = kind("b", 1, 2, 30, most)
    failed, intact = parse(render([many, neighbour]))
    refusal_of(failed, "a", "continuations")
    assert failed.round == 2
    assert intact == neighbour
