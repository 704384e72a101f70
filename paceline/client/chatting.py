"""Conversations: the server renders the model's chat template, and the prompt is then one like any other.

So is the stream: where it breaks, the prompt is asked for again, and not the conversation.
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
"""What `stream` returns."""
Messages = Sequence[Mapping[str, Any]]
"""`role` (system, developer, user or assistant), `content`, and perhaps `name`: text each."""
LEAST_SECONDS = 1e-3
"""What is left at least of a deadline: the server then says that it has passed."""


class Ending(TypedDict, total=False):
    """How the prompt of a conversation ends, and variables of its template."""

    add_generation_prompt: bool | None
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any] | None


class Options(Ending, total=False):
    """The same, and what `stream` takes."""

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
    """An answer may fill the model's length, unless parameters say otherwise."""
    if value is None or (isinstance(value, Mapping) and "max_tokens" not in value):
        return SamplingParams.from_mapping({**(value or {}), "max_tokens": None})
    return value


def _split(options: Options) -> tuple[Ending, dict[str, Any]]:
    """What concerns the template, and what `stream` takes. Raises TypeError for a name of neither."""
    for name in options:
        if name not in Options.__annotations__:
            raise TypeError(f"unexpected keyword argument {name!r}")
    rest: dict[str, Any] = dict(options)
    ending: dict[str, Any] = {name: rest.pop(name) for name in Ending.__annotations__ if name in rest}
    return ending, rest  # type: ignore[return-value]


class _Deadline:
    """One time for several calls."""

    def __init__(self, timeout: float | None) -> None:
        seconds = requests.checked_timeout(timeout)
        self._end = None if seconds is None else monotonic() + seconds

    @property
    def left(self) -> float | None:
        """Seconds for the next call."""
        return None if self._end is None else max(LEAST_SECONDS, self._end - monotonic())


class Chatting(ABC, Generic[StreamT]):
    """What `Client` does with conversations."""

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
        """Ask the server."""

    def apply_chat_template(
        self, messages: Messages, *, timeout: float | None = None, **ending: Unpack[Ending]
    ) -> tuple[int, ...]:
        """The conversation as a prompt, by the chat template of the server's tokenizer.

        Args:
            messages: dictionaries with `role`, `content` and perhaps `name`, the oldest first.
            timeout: as for every call.
            ending: `add_generation_prompt` opens the assistant's turn, by default unless
                `continue_final_message` lets the model go on with the last message;
                `chat_template_kwargs` are more variables of the template.
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
        """The assistant's next message. Without `max_tokens` it may fill the model's length.

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
        """The same, chunk by chunk as they arrive."""
        prompt, rest = self._prompt_of(messages, timeout, options)
        return self.stream(prompt, _sampling(sampling), **rest)

    def _prompt_of(
        self, messages: Messages, timeout: float | None, options: Options
    ) -> tuple[tuple[int, ...], dict[str, Any]]:
        """The prompt, and what else `stream` takes: the time that is left among it."""
        deadline = _Deadline(timeout)
        ending, rest = _split(options)
        prompt = self.apply_chat_template(messages, timeout=deadline.left, **ending)
        return prompt, {**rest, "timeout": deadline.left}


class AsyncChatting(ABC, Generic[StreamT]):
    """What `AsyncClient` does with conversations."""

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
        """Ask the server."""

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
        """The same, chunk by chunk: `async for chunk in await client.stream_chat(...)`."""
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
