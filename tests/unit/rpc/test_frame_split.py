"""Commands and events are split into messages in order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core import limits
from paceline.core.messages import CloseSequence
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
        told = [frames.target_commands(message) for message in messages]  # type: ignore[arg-type]
    assert [command for each in told for command in each] == commands
    for message, each in zip(messages, told, strict=True):
        assert len(each) == 1 or message.ByteSize() <= most_bytes


def test_commands_that_fit_are_one_message() -> None:
    commands = [CloseSequence("s", i) for i in range(100)]
    (message,) = framed(commands, frames.verify_request)
    assert frames.target_commands(message) == commands  # type: ignore[arg-type]
