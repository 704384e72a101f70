"""The codec of conversations."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.rpc.codec.chat import ChatCall, chat_from_proto, chat_to_proto
from paceline.v1 import generation_pb2 as pb

MESSAGES = [{"role": "user", "content": "é", "name": "ann"}, {"role": "assistant", "content": ""}]


@pytest.mark.parametrize("opens", [None, True, False])
def test_a_conversation_round_trips(opens: bool | None) -> None:
    call = ChatCall(MESSAGES, opens, True, {"a": [1, None]})
    assert chat_from_proto(chat_to_proto(call)) == call


def message(role: str = "user", content: str = "x") -> pb.ChatMessage:
    return pb.ChatMessage(role=role, content=content)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({}, "messages"),
        ({"messages": [message()] * (limits.MAX_MESSAGES + 1)}, "messages"),
        ({"messages": [message(), message("tool")]}, "messages[1].role"),
        ({"messages": [message("")]}, "messages[0].role"),
        ({"messages": [message()], "variables": "[]"}, "chat_template_kwargs"),
        ({"messages": [message()], "variables": "{"}, "chat_template_kwargs"),
        ({"messages": [message()], "variables": "[" * 9999}, "chat_template_kwargs"),
        (
            {"messages": [message()], "variables": json.dumps({"a": "x" * limits.MAX_STRUCTURE_CHARACTERS})},
            "chat_template_kwargs",
        ),
    ],
)
def test_an_unrenderable_conversation_is_named(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        chat_from_proto(pb.ApplyChatTemplateRequest(**values))
    assert caught.value.field == field


def test_unknown_fields_of_a_message_are_refused() -> None:
    odd = pb.ChatMessage.FromString(message().SerializeToString() + b"\x78\x01")
    with pytest.raises(InvalidArgumentError) as caught:
        chat_from_proto(pb.ApplyChatTemplateRequest(messages=[odd]))
    assert caught.value.field == "messages[0]"
