"""Conversations: the server renders the model's chat template to a prompt, which is then generated as usual.

A broken stream is resumed with the rendered prompt, not with the conversation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypedDict, TypeVar, Unpack

from paceline.client import requests
from paceline.client.results import GenerationResult
from paceline.core.clock import monotonic
from paceline.core.types import SamplingParams
from paceline.rpc.codec.chat import ChatCall, chat_to_proto
from paceline.v1 import generation_pb2

StreamT = TypeVar("StreamT")
"""Return type of `stream`."""
Messages = Sequence[Mapping[str, Any]]
"""Text values for `role` (system, developer, user or assistant), `content`, and optionally `name`."""
LEAST_SECONDS = 1e-3
"""Smallest remaining deadline to send, so that the server reports it as exceeded."""


class Ending(TypedDict, total=False):
    """Options of the chat template: the end of the prompt, and variables."""

    add_generation_prompt: bool | None
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any] | None


class Options(Ending, total=False):
    """Options of the chat template and of `stream`."""

    speculation: requests.Speculation
    request_id: str | None
    cache_salt: str | None


def _request(
    messages: Messages,
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> generation_pb2.ApplyChatTemplateRequest:
    call = ChatCall(messages, add_generation_prompt, continue_final_message, chat_template_kwargs)
    return chat_to_proto(call)


def _sampling(value: requests.Sampling) -> requests.Sampling:
    """Default `max_tokens` to None: an answer may fill the model's length."""
    if value is None or (isinstance(value, Mapping) and "max_tokens" not in value):
        return SamplingParams.from_mapping({**(value or {}), "max_tokens": None})
    return value


def _split(options: Options) -> tuple[Ending, dict[str, Any]]:
    """Split into template options and `stream` options. Raises TypeError for an unknown name."""
    for name in options:
        if name not in Options.__annotations__:
            raise TypeError(f"unexpected keyword argument {name!r}")
    rest: dict[str, Any] = dict(options)
    ending: dict[str, Any] = {name: rest.pop(name) for name in Ending.__annotations__ if name in rest}
    return ending, rest  # type: ignore[return-value]


class _Deadline:
    """One deadline for several calls."""

    def __init__(self, timeout: float | None) -> None:
        seconds = requests.checked_timeout(timeout)
        self._end = None if seconds is None else monotonic() + seconds

    @property
    def left(self) -> float | None:
        """Seconds for the next call."""
        return None if self._end is None else max(LEAST_SECONDS, self._end - monotonic())


class Chatting(ABC, Generic[StreamT]):
    """Conversation methods of `Client`."""

    @abstractmethod
    def stream(
        self,
        prompt: requests.Prompt,
        sampling: requests.Sampling = None,
        *,
        speculation: requests.Speculation = None,
        request_id: str | None = None,
        cache_salt: str | None = None,
        timeout: float | None = None,
    ) -> StreamT:
        """As `Client.stream`."""

    @abstractmethod
    def generate(
        self,
        prompt: requests.Prompt,
        sampling: requests.Sampling = None,
        *,
        speculation: requests.Speculation = None,
        request_id: str | None = None,
        cache_salt: str | None = None,
        timeout: float | None = None,
    ) -> GenerationResult:
        """As `Client.generate`."""

    @abstractmethod
    def _apply_chat_template(
        self, request: generation_pb2.ApplyChatTemplateRequest, timeout: float | None
    ) -> generation_pb2.ApplyChatTemplateResponse:
        """Call the server."""

    def apply_chat_template(
        self, messages: Messages, *, timeout: float | None = None, **ending: Unpack[Ending]
    ) -> tuple[int, ...]:
        """The conversation as a prompt, by the chat template of the server's tokenizer.

        Args:
            messages: dictionaries with `role`, `content` and optionally `name`, oldest first.
            timeout: as for every call.
            ending: `add_generation_prompt` opens the assistant's turn (the default unless
                `continue_final_message` is set); `continue_final_message` lets the model continue the last
                message; `chat_template_kwargs` are additional variables of the template.
        """
        return tuple(self._apply_chat_template(_request(messages, **ending), timeout).token_ids)

    def chat(
        self,
        messages: Messages,
        sampling: requests.Sampling = None,
        *,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> GenerationResult:
        """Generate the assistant's next message. Without `max_tokens` it may fill the model's length.

        `options` are those of `apply_chat_template` and of `generate`.
        """
        prompt, rest = self._prompt_of(messages, timeout, options)
        return self.generate(prompt, _sampling(sampling), **rest)

    def stream_chat(
        self,
        messages: Messages,
        sampling: requests.Sampling = None,
        *,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> StreamT:
        """As `chat`, with chunks as they arrive."""
        prompt, rest = self._prompt_of(messages, timeout, options)
        return self.stream(prompt, _sampling(sampling), **rest)

    def _prompt_of(
        self, messages: Messages, timeout: float | None, options: Options
    ) -> tuple[tuple[int, ...], dict[str, Any]]:
        """The prompt, and the remaining arguments of `stream` with the remaining timeout."""
        deadline = _Deadline(timeout)
        ending, rest = _split(options)
        prompt = self.apply_chat_template(messages, timeout=deadline.left, **ending)
        return prompt, {**rest, "timeout": deadline.left}


class AsyncChatting(ABC, Generic[StreamT]):
    """Conversation methods of `AsyncClient`."""

    @abstractmethod
    def stream(
        self,
        prompt: requests.Prompt,
        sampling: requests.Sampling = None,
        *,
        speculation: requests.Speculation = None,
        request_id: str | None = None,
        cache_salt: str | None = None,
        timeout: float | None = None,
    ) -> StreamT:
        """As `AsyncClient.stream`."""

    @abstractmethod
    async def generate(
        self,
        prompt: requests.Prompt,
        sampling: requests.Sampling = None,
        *,
        speculation: requests.Speculation = None,
        request_id: str | None = None,
        cache_salt: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> GenerationResult:
        """As `AsyncClient.generate`."""

    @abstractmethod
    async def _apply_chat_template(
        self,
        request: generation_pb2.ApplyChatTemplateRequest,
        timeout: float | None,  # noqa: ASYNC109
    ) -> generation_pb2.ApplyChatTemplateResponse:
        """Call the server."""

    async def apply_chat_template(
        self,
        messages: Messages,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
        **ending: Unpack[Ending],
    ) -> tuple[int, ...]:
        """As `Client.apply_chat_template`."""
        return tuple((await self._apply_chat_template(_request(messages, **ending), timeout)).token_ids)

    async def chat(
        self,
        messages: Messages,
        sampling: requests.Sampling = None,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
        **options: Unpack[Options],
    ) -> GenerationResult:
        """As `Client.chat`."""
        prompt, rest = await self._prompt_of(messages, timeout, options)
        return await self.generate(prompt, _sampling(sampling), **rest)

    async def stream_chat(
        self,
        messages: Messages,
        sampling: requests.Sampling = None,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
        **options: Unpack[Options],
    ) -> StreamT:
        """As `chat`, with chunks as they arrive: `async for chunk in await client.stream_chat(...)`."""
        prompt, rest = await self._prompt_of(messages, timeout, options)
        return self.stream(prompt, _sampling(sampling), **rest)

    async def _prompt_of(
        self,
        messages: Messages,
        timeout: float | None,  # noqa: ASYNC109
        options: Options,
    ) -> tuple[tuple[int, ...], dict[str, Any]]:
        """As `Chatting._prompt_of`."""
        deadline = _Deadline(timeout)
        ending, rest = _split(options)
        prompt = await self.apply_chat_template(messages, timeout=deadline.left, **ending)
        return prompt, {**rest, "timeout": deadline.left}
