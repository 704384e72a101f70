"""Conversations as prompts, by the model's chat template and its tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from coordinator.api.chat_template import ChatTemplate
from coordinator.app import Coordinator
from coordinator.text.vocabulary import LONG_TEXT
from paceline.core.errors import InvalidArgumentError

NO_TEMPLATE = (
    "the model's tokenizer has no chat template: send a prompt instead, or start the coordinator with"
    " --chat-template FILE"
)


class Conversations:
    """Turns messages into tokens, for gRPC and HTTP."""

    def __init__(self, coordinator: Coordinator, template: ChatTemplate | None) -> None:
        self._coordinator = coordinator
        self._template = template

    async def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """The prompt as tokens. Raises InvalidArgumentError.

        Args:
            messages: `role`, `content` (a string or a list of text parts) and optionally `name`.
            add_generation_prompt: end with the opening of the assistant's turn; None does, unless the last
                message is continued.
            continue_final_message: end at the end of the last message's content.
            variables: variables of the template.
            add_special_tokens: add the tokenizer's special tokens. Templates usually write special tokens
                themselves.
        """
        if self._template is None:
            raise InvalidArgumentError("messages", NO_TEMPLATE)
        if continue_final_message and add_generation_prompt:
            message = "cannot be combined with add_generation_prompt: the last message is still open"
            raise InvalidArgumentError("continue_final_message", message)
        size = sum(map(_size, messages))
        self._coordinator.check_length("messages", size)
        render = partial(
            self._template.render,
            messages,
            add_generation_prompt=add_generation_prompt is not False and not continue_final_message,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        # A conversation that is long, or that has names and is rendered several times, is rendered in a
        # thread.
        long = size > LONG_TEXT or any("name" in message for message in messages)
        text = await asyncio.to_thread(render) if long else render()
        return await self._coordinator.tokenize(text, add_special_tokens=add_special_tokens)


def _size(message: Mapping[str, Any]) -> int:
    """Characters of a message's text."""
    content = message["content"]
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)
