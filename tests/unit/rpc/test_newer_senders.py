"""Frames of a newer sender: unknown fields are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import Message

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
from paceline.core.types import AcceptanceMode, Proposal, SamplingParams, SequenceParams
from paceline.rpc.streams import frames

FIELD = 100
OPEN = OpenSequence("s", 1, (1, 2), SequenceParams(SamplingParams(seed=1), AcceptanceMode.BLOCK, 2))
AHEAD = VerifyAhead("s", 1, 2, 3, {(0, 5): Proposal((6, 7))})
FORESEEN = Continuations("s", 1, 2, 3, {(0, 5): Proposal((6, 7))})
TARGET = frames.verify_request, frames.target_commands
DRAFT = frames.draft_request, frames.draft_commands
EVENTS = frames.draft_response, frames.draft_events


def with_more(message: Message) -> None:
    """One varint field more, in place."""
    message.MergeFromString(bytes([FIELD << 3 & 127 | 128, FIELD << 3 >> 7, 1]))


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
    assert isinstance(failed, SequenceFailed)
    assert (failed.sequence_id, failed.epoch) == ("s", 1)
    assert isinstance(failed.error, InvalidArgumentError)
    assert failed.error.field == field
    assert str(FIELD) in failed.error.message
    assert intact == command


@pytest.mark.parametrize("dialect", [TARGET, DRAFT], ids=["target", "draft"])
def test_a_sequence_is_closed_despite_unknown_fields(dialect: Any) -> None:
    """Otherwise it would keep its blocks."""
    render, parse = dialect
    closing = CloseSequence("s", 1)
    frame = render([closing])
    with_more(frame.commands[0].close_sequence)
    assert parse(frame) == [closing]
