"""Conversion of conversations between protobuf and plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.rpc.codec.sampling import check_text, refuse_unknown_fields
from paceline.v1 import generation_pb2

CHAT_ROLES: Final = ("system", "developer", "user", "assistant")
_MEMBERS: Final = ("role", "content", "name")


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A conversation and the options of its template."""

    messages: Sequence[Mapping[str, Any]]
    """Text values for `role`, `content`, and optionally `name`."""
    add_generation_prompt: bool | None = None
    """None opens the assistant's turn, unless the last message is continued."""
    continue_final_message: bool = False
    variables: Mapping[str, Any] | None = None
    """Additional variables of the template."""


def chat_to_proto(call: ChatCall) -> generation_pb2.ApplyChatTemplateRequest:
    """The SDK's message. Raises InvalidArgumentError naming an argument that the wire cannot carry."""
    messages: Any = call.messages
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidArgumentError("messages", "must be a list of messages")
    for name in ("add_generation_prompt", "continue_final_message"):
        if not isinstance(getattr(call, name), bool | None):
            raise InvalidArgumentError(name, "must be true or false")
    request = generation_pb2.ApplyChatTemplateRequest(
        messages=[_message_to_proto(index, message) for index, message in enumerate(messages)],
        continue_final_message=bool(call.continue_final_message),
        variables=_variables_to_text(call.variables),
    )
    if call.add_generation_prompt is not None:
        request.add_generation_prompt = call.add_generation_prompt
    return request


def _message_to_proto(index: int, message: Any) -> generation_pb2.ChatMessage:
    if not isinstance(message, Mapping):
        raise InvalidArgumentError(f"messages[{index}]", "must be a dictionary with role and content")
    for name in message:
        if name not in _MEMBERS:
            known = ", ".join(_MEMBERS)
            raise InvalidArgumentError(f"messages[{index}].{name}", f"unknown member; known are {known}")
    for name in ("role", "content"):
        if name not in message:
            raise InvalidArgumentError(f"messages[{index}].{name}", "is required")
    values = {name: value for name, value in message.items() if name != "name" or value is not None}
    for name, value in values.items():
        if not isinstance(value, str):
            raise InvalidArgumentError(f"messages[{index}].{name}", "must be a string")
        check_text(f"messages[{index}].{name}", value)
    return generation_pb2.ChatMessage(**values)


def _variables_to_text(variables: Mapping[str, Any] | None) -> str:
    if variables is None:
        return ""
    if not isinstance(variables, Mapping):
        raise InvalidArgumentError("chat_template_kwargs", "must be a dictionary")
    try:
        text = json.dumps(dict(variables), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise InvalidArgumentError("chat_template_kwargs", "must be representable in JSON") from None
    check_text("chat_template_kwargs", text)
    return text


def chat_from_proto(request: generation_pb2.ApplyChatTemplateRequest) -> ChatCall:
    """Raises InvalidArgumentError naming the field."""
    if not 1 <= len(request.messages) <= limits.MAX_MESSAGES:
        bounds = f"must be between 1 and {limits.MAX_MESSAGES} messages, got {len(request.messages)}"
        raise InvalidArgumentError("messages", bounds)
    refuse_unknown_fields(request, "request")
    return ChatCall(
        [_message_from_proto(index, message) for index, message in enumerate(request.messages)],
        request.add_generation_prompt if request.HasField("add_generation_prompt") else None,
        request.continue_final_message,
        _variables_from_text(request.variables),
    )


def _message_from_proto(index: int, message: generation_pb2.ChatMessage) -> dict[str, str]:
    refuse_unknown_fields(message, f"messages[{index}]")
    if message.role not in CHAT_ROLES:
        raise InvalidArgumentError(f"messages[{index}].role", f"must be one of {', '.join(CHAT_ROLES)}")
    shown = {"role": message.role, "content": message.content}
    return shown | ({"name": message.name} if message.name else {})


def _variables_from_text(text: str) -> Mapping[str, Any] | None:
    if not text:
        return None
    if len(text) > limits.MAX_STRUCTURE_CHARACTERS:
        bound = f"at most {limits.MAX_STRUCTURE_CHARACTERS} characters of JSON"
        raise InvalidArgumentError("chat_template_kwargs", bound)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise InvalidArgumentError("chat_template_kwargs", "must be a JSON object")
    return values
