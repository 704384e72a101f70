"""The requests of each endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Tag
from pydantic_core import PydanticCustomError

from coordinator.api.http.openai.schema.fields import (
    Label,
    Schema,
    Strings,
    TokenIds,
    TolerantSchema,
    one_of,
    told,
)
from coordinator.api.http.openai.schema.parameters import MAX_METADATA_ENTRIES, GenerationRequest
from coordinator.api.http.openai.schema.unsupported import (
    CHAT,
    COMPLETION,
    SWITCHED_OFF_BY,
    TOKENIZE,
    Unsupported,
)
from paceline.core import limits
from paceline.core.errors import InvalidArgumentError

Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[Strings, Tag("<texts>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[list[TokenIds], Field(fail_fast=True), Tag("<lists>")],
    one_of("must be a string, a list of strings, a list of token ids or a list of such lists"),
]


class CompletionRequest(GenerationRequest):
    """`/v1/completions`."""

    UNSUPPORTED: ClassVar[Mapping[str, Unsupported]] = COMPLETION

    prompt: Prompt
    max_tokens: int | None = told("0 requires echo.", minimum=0, maximum=limits.MAX_TOKENS)
    best_of: int | None = told("Only the value of n.")
    logprobs: int | None = told(
        "Likeliest tokens to report at each token.", minimum=0, maximum=limits.MAX_LOGPROBS
    )
    echo: bool | None = None

    @property
    def echoes_logprobs(self) -> bool:
        """True if `logprobs` also covers the prompt."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def names(self) -> dict[str, str]:
        """Maps a core field to its name in this request, if the names differ."""
        renamed = self.echoes_logprobs and self.prompt_logprobs is None
        names = super().names | {"text": "prompt"}
        return names | ({"prompt_logprobs": "logprobs"} if renamed else {})

    @property
    def scores_only(self) -> bool:
        """True if the prompt is reported and nothing is generated."""
        return self.max_tokens == 0 and bool(self.echo)

    @property
    def changes_prompt(self) -> bool:
        """True if the prompt's tokens differ from the core's own tokenisation."""
        cut = self.truncate_prompt_tokens is not None or self.truncation_side is not None
        return cut or self.add_special_tokens is False


class TextPart(Schema):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


TextParts = Annotated[list[TextPart], Field(fail_fast=True, max_length=limits.MAX_MESSAGES)]
Content = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[TextParts, Tag("<parts>")]
    | Annotated[TextParts, Tag("<texts>")],
    one_of("must be a string or a list of text parts"),
]


def _nothing(value: Any) -> Any:
    if value not in (None, []):
        raise PydanticCustomError("unsupported", "is not supported by this server")
    return value


Nothing = Annotated[None, BeforeValidator(_nothing)]
NothingListed = Annotated[Annotated[list[Any], Field(max_length=0)] | None, BeforeValidator(_nothing)]


class Message(Schema):
    """One message of a conversation, as passed to the model's chat template."""

    role: Literal["system", "developer", "user", "assistant"]
    # Before the content, which an answer with tool calls lacks: the first error is the one that is reported.
    tool_calls: NothingListed = None
    function_call: Nothing = None
    content: Content
    name: str | None = None
    # Members of an answer that clients send back with the conversation, and their additions: the content as
    # an object, and fields of another server.
    type: Literal["text"] | None = None
    parsed: Any = None
    provider_specific_fields: Any = None
    refusal: None = None
    annotations: NothingListed = None
    audio: None = None
    reasoning: None = None
    reasoning_content: None = None
    tool_call_id: None = None

    @property
    def shown(self) -> dict[str, Any]:
        """The members visible to a chat template."""
        return self.model_dump(include={"role", "content", "name"}, exclude_none=True)


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=limits.MAX_MESSAGES)]


class ChatRequest(GenerationRequest):
    """`/v1/chat/completions`."""

    UNSUPPORTED: ClassVar[Mapping[str, Unsupported]] = CHAT

    messages: Messages
    max_completion_tokens: int | None = told(minimum=1, maximum=limits.MAX_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = told(
        "Likeliest tokens to report at each token; requires logprobs=true.",
        minimum=0,
        maximum=limits.MAX_LOGPROBS,
    )
    add_generation_prompt: bool | None = told("Open the assistant's turn; the default.")
    continue_final_message: bool | None = told("Continue the last message instead of starting a new one.")
    chat_template_kwargs: dict[str, Any] | None = told("Variables of the model's chat template.")
    metadata: Annotated[dict[str, Label], Field(max_length=MAX_METADATA_ENTRIES)] | None = told(
        "Labels of the caller's, without effect and not stored."
    )
    safety_identifier: Label | None = told("As `user`.")
    prompt_cache_key: Label | None = told("As `user`.")

    @property
    def names(self) -> dict[str, str]:
        """Maps a core field to its name in this request, if the names differ."""
        names = super().names | {"prompt": "messages", "text": "messages", "logprobs": "top_logprobs"}
        return (
            names if self.max_completion_tokens is None else names | {"max_tokens": "max_completion_tokens"}
        )

    @classmethod
    def _is_harmless(cls, name: str, values: Mapping[str, Any]) -> bool:
        """Tools that may not be called are no reason to refuse a conversation."""
        if name in SWITCHED_OFF_BY and values.get(SWITCHED_OFF_BY[name]) == "none":
            return isinstance(values[name], list | None) and all(
                isinstance(each, dict) for each in values[name] or ()
            )
        return super()._is_harmless(name, values)

    @property
    def num_logprobs(self) -> int | None:
        """The core's `logprobs`. Raises InvalidArgumentError."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidArgumentError("top_logprobs", "requires logprobs=true")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        """`max_completion_tokens`, or its older name `max_tokens`. Raises InvalidArgumentError."""
        new, old = self.max_completion_tokens, self.max_tokens
        if None not in (new, old) and new != old:
            raise InvalidArgumentError("max_completion_tokens", f"is {new}, but max_tokens is {old}")
        return old if new is None else new


class TokenizeRequest(TolerantSchema):
    """`/tokenize`: a prompt, or a conversation."""

    UNSUPPORTED: ClassVar[Mapping[str, Unsupported]] = TOKENIZE

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = told("Add the tokenizer's special tokens; the default for a prompt.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = told("Also return the tokens as written in the vocabulary.")


class DetokenizeRequest(Schema):
    """`/detokenize`."""

    model: str | None = None
    tokens: TokenIds
