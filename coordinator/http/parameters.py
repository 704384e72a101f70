"""What `/v1/completions` and `/v1/chat/completions` have in common: sampling, streaming, speculation.

A parameter is honoured or refused with its name. `null` stands for the default, as with OpenAI. Parameters
of OpenAI's and vLLM's that this server cannot honour are accepted with the values that change nothing
(`NO_EFFECT`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    model_validator,
)
from pydantic_core import CoreSchema

from coordinator.coordinator import Coordinator
from coordinator.http.errors import HttpError, unknown_parameter, unsupported_parameter
from coordinator.http.structures import (
    FORMAT_NAMES,
    ResponseFormat,
    StructuredOutputsBody,
    TextFormat,
    structure_of,
)
from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.core.types import AcceptanceMode, SamplingParams, SpeculationParams, StructuredOutputs
from paceline.rpc.codec import GenerateCall, generate_request_from_proto, generate_request_to_proto

MAX_LABEL_CHARACTERS = 512
MAX_METADATA_ENTRIES = 16

TokenId = Annotated[int, Field(json_schema_extra={"minimum": 0, "maximum": 2**32 - 1})]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
"""A list is judged by its first bad item: a report on each of a million would take seconds to make."""
Strings = Annotated[list[str], Field(fail_fast=True)]
Label = Annotated[str, Field(max_length=MAX_LABEL_CHARACTERS)]


def told(description: str | None = None, **bounds: Any) -> Any:
    """A field that may be left out. `bounds` are for the document: the core checks, once for all faces."""
    return Field(None, description=description, json_schema_extra=bounds or None)


def shape_of(value: Any) -> str:
    """Which alternative of a field a value is meant to be: the tag that its type carries."""
    match value:
        case str():
            return "<text>"
        case bool() | [bool(), *_]:
            return "<other>"
        case int():
            return "<number>"
        case [int(), *_]:
            return "<ids>"
        case [list(), *_]:
            return "<lists>"
        case [dict(), *_]:
            return "<parts>"
    return "<texts>" if isinstance(value, list) else "<other>"


def one_of(message: str) -> Discriminator:
    """The choice among alternatives that are tagged with what `shape_of` gives."""
    return Discriminator(shape_of, custom_error_type="alternatives", custom_error_message=message)


Texts = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Strings, Tag("<texts>")],
    one_of("must be a string or a list of strings"),
]


DraftTokens = Annotated[
    Annotated[int, Tag("<number>")] | Annotated[Literal["auto"], Tag("<text>")],
    one_of("must be an integer or auto"),
]


class Schema(BaseModel):
    """A JSON object without implicit conversions and without unknown members."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TolerantSchema(Schema):
    """A request that may also say what is done anyway, in words that other servers know."""

    NO_EFFECT: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Parameters of OpenAI's and vLLM's without a field here, and their values that change nothing, for they
    say what is done anyway. None always does.
    """

    @model_validator(mode="before")
    @classmethod
    def _only_what_can_be_honoured(cls, values: Any) -> Any:
        for name, value in values.items():
            if name in cls.model_fields:
                continue
            if name not in cls.NO_EFFECT:
                raise unknown_parameter(name)
            if value is not None and not any(_same(value, other) for other in cls.NO_EFFECT[name]):
                raise unsupported_parameter(name)
        return {name: value for name, value in values.items() if name in cls.model_fields}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for name, values in cls.NO_EFFECT.items():
            # Among numbers of JSON 1 and 1.0 are one, and values of an enum differ.
            unlike = [value for index, value in enumerate(values) if value not in values[:index]]
            properties[name] = {"enum": [*unlike, None], "default": None, "description": "Without effect."}
        return schema


class StreamOptions(Schema):
    """How to stream."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: bool | None = told("Usage so far in every event, and at the end.")


class SpeculativeDecoding(Schema):
    """How to speculate for this request."""

    num_speculative_tokens: DraftTokens | None = told(
        "K; 0 switches drafting off, `auto` lets the server choose.",
        minimum=0,
        maximum=limits.MAX_SPECULATIVE_TOKENS,
    )
    acceptance: str | None = told(enum=[*(mode.value for mode in AcceptanceMode), None])
    prompt_lookup: bool | None = told("Whether draft tokens may be copied from the text so far.")


def _not_too_low(temperature: float) -> float:
    return limits.MIN_TEMPERATURE if 0 < temperature < limits.MIN_TEMPERATURE else temperature


Temperature = Annotated[float, AfterValidator(_not_too_low)]
"""The core refuses those above 0 that it cannot divide by; clients send them for what is nearly greedy."""


class GenerationRequest(TolerantSchema):
    """What both endpoints take. A field that is None takes the default of SamplingParams."""

    NO_EFFECT: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "length_penalty": (1.0, 1),
        "priority": (0,),
        "return_token_ids": (False,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "truncate_prompt_tokens": (),
        "use_beam_search": (False,),
    }

    model: str | None = told("The served model; null and an empty text take it.")
    temperature: Temperature | None = told(
        f"Above 0 and below {limits.MIN_TEMPERATURE} it is raised to that.",
        minimum=0,
        maximum=limits.MAX_TEMPERATURE,
    )
    top_p: float | None = told(exclusiveMinimum=0, maximum=1)
    top_k: int | None = told(minimum=-1, maximum=2**31 - 1)
    min_p: float | None = told(minimum=0, maximum=1)
    repetition_penalty: float | None = told(
        minimum=limits.MIN_REPETITION_PENALTY, maximum=limits.MAX_REPETITION_PENALTY
    )
    presence_penalty: float | None = told(minimum=-2, maximum=2)
    frequency_penalty: float | None = told(minimum=-2, maximum=2)
    logit_bias: Annotated[dict[str, float], Field(max_length=limits.MAX_LOGIT_BIAS_ENTRIES)] | None = told(
        "Token ids as strings, to their biases.",
        propertyNames={"pattern": "^[0-9]{1,10}$"},
    )
    seed: int | None = told(minimum=0, maximum=limits.MAX_SEED)
    max_tokens: int | None = told(minimum=1, maximum=limits.MAX_TOKENS)
    min_tokens: int | None = told(minimum=0, maximum=limits.MAX_TOKENS)
    stop: Texts | None = told(maxItems=limits.MAX_STOP_STRINGS)
    stop_token_ids: TokenIds | None = told(maxItems=limits.MAX_STOP_TOKEN_IDS)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Texts | None = told(maxItems=limits.MAX_BAD_WORDS)
    allowed_token_ids: TokenIds | None = told(minItems=1, maxItems=limits.MAX_ALLOWED_TOKEN_IDS)
    prompt_logprobs: int | None = told(
        "Likeliest tokens at each token of the prompt.", minimum=0, maximum=limits.MAX_LOGPROBS
    )
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsBody | None = None
    n: int | None = told("Choices for each prompt.", minimum=1, maximum=limits.MAX_N)
    stream: bool | None = None
    stream_options: StreamOptions | None = told("Goes with stream=true.")
    speculative_decoding: SpeculativeDecoding | None = None
    include_speculative_decoding: bool | None = told("Whether the usage says what speculation did.")
    cache_salt: str | None = told(
        "Requests with different salts never share cached prefixes.",
        maxLength=limits.MAX_CACHE_SALT_CHARACTERS,
    )
    user: Label | None = told("A label of the caller's: it changes nothing, is not kept.")

    @property
    def names(self) -> dict[str, str]:
        """A core field's name to the name it has in this request, where they differ."""
        names = {
            "num_speculative_tokens": "speculative_decoding.num_speculative_tokens",
            "acceptance": "speculative_decoding.acceptance",
            "prompt_lookup": "speculative_decoding.prompt_lookup",
        }
        by_format = self.structured_outputs is None and self.response_format is not None
        return names | FORMAT_NAMES if by_format else names

    @property
    def include_usage(self) -> bool:
        """Whether the last event of a stream is the usage."""
        options = self.stream_options
        return options is not None and bool(options.include_usage or options.continuous_usage_stats)

    @property
    def tells_usage_so_far(self) -> bool:
        """Whether every event of a stream has it."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def sampling(self, **own: Any) -> SamplingParams:
        """Raises InvalidArgumentError naming the core field."""
        names = {f.name for f in fields(SamplingParams)} & set(type(self).model_fields)
        given = {name: value for name in names if (value := getattr(self, name)) is not None} | own
        if self.logit_bias is not None:
            given["logit_bias"] = _token_bias(self.logit_bias)
        given["structured_outputs"] = self._structure()
        return SamplingParams(**given)

    def _structure(self) -> StructuredOutputs | None:
        if self.structured_outputs is None:
            return None if self.response_format is None else structure_of(self.response_format)
        if not (self.response_format is None or isinstance(self.response_format, TextFormat)):
            raise InvalidArgumentError("response_format", "cannot be combined with structured_outputs")
        return self.structured_outputs.value()

    def speculation(self) -> SpeculationParams:
        """Raises InvalidArgumentError naming the core field."""
        if self.speculative_decoding is None:
            return SpeculationParams()
        return SpeculationParams(**self.speculative_decoding.model_dump())


def check_model(name: str | None, served: str) -> None:
    """Raises HttpError with OpenAI's code for a model that is not there."""
    if name and name != served:
        raise HttpError(
            404, "model: this server does not serve it; see /v1/models", param="model", code="model_not_found"
        )


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def _token_bias(values: Mapping[str, float]) -> dict[int, float]:
    result: dict[int, float] = {}
    for name, bias in values.items():
        if not (name.isascii() and name.isdecimal() and len(name) <= 10):
            raise InvalidArgumentError("logit_bias", "its keys must be token ids")
        if int(name) in result:
            raise InvalidArgumentError("logit_bias", f"token id {int(name)} is named twice")
        result[int(name)] = bias
    return result


def head_of(prefix: str, wanted: GenerationRequest, coordinator: Coordinator) -> dict[str, Any]:
    """What every object of one answer begins with.

    Raises HttpError for a model that is not there, InvalidArgumentError for options of no stream.
    """
    served = coordinator.model_name
    check_model(wanted.model, served)
    options = wanted.stream_options
    if options is not None and not wanted.stream:
        raise InvalidArgumentError("stream_options", "goes with stream=true")
    if options is not None and options.continuous_usage_stats and options.include_usage is False:
        raise InvalidArgumentError("stream_options.continuous_usage_stats", "goes with include_usage")
    if wanted.stream and wanted.include_speculative_decoding and not wanted.include_usage:
        raise InvalidArgumentError("include_speculative_decoding", "goes with stream_options.include_usage")
    return {"id": f"{prefix}-{secrets.token_hex(16)}", "created": int(time.time()), "model": served}


def make_call(
    request_id: str,
    prompt: str | tuple[int, ...],
    sampling: SamplingParams,
    speculation: SpeculationParams,
    cache_salt: str | None = None,
) -> GenerateCall:
    """The core's call, through the very message that the gRPC face takes: what is refused there is refused
    here, with the same words. Raises InvalidArgumentError naming the core field.
    """
    call = GenerateCall(request_id, prompt, sampling, speculation, cache_salt or "")
    return generate_request_from_proto(generate_request_to_proto(call))


def make_calls(
    request_id: str,
    prompts: Sequence[str | tuple[int, ...]],
    sampling: SamplingParams,
    speculation: SpeculationParams,
    cache_salt: str | None = None,
) -> list[GenerateCall]:
    """As `make_call`, one for each prompt. What they share is checked once: it may name 32,768 tokens."""
    first = make_call(f"{request_id}-0", prompts[0], sampling, speculation, cache_salt)
    calls, plain = [first], SamplingParams()
    for index, prompt in enumerate(prompts[1:], 1):
        call = make_call(f"{request_id}-{index}", prompt, plain, speculation, cache_salt)
        calls.append(replace(call, sampling=first.sampling))
    return calls
