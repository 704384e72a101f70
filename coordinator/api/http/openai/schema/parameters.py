"""Common parameters of `/v1/completions` and `/v1/chat/completions`: sampling, streaming, speculation.

A parameter is followed or refused by name. `null` stands for the default, as in OpenAI's API. Unsupported
parameters of OpenAI and vLLM are listed in unsupported.py.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from hashlib import blake2b
from importlib.metadata import version
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    Tag,
)

from coordinator.api.http.openai.logprobs import LogprobWriter
from coordinator.api.http.openai.schema.fields import (
    Label,
    Schema,
    Strings,
    Texts,
    TokenIds,
    TolerantSchema,
    shape_of,
    told,
)
from coordinator.api.http.openai.schema.structures import (
    JsonSchemaValue,
    ResponseFormat,
    StructuredOutputsBody,
    TextFormat,
    format_names,
    structure_of,
)
from coordinator.api.http.openai.schema.unsupported import GENERATION, Unsupported
from coordinator.api.http.server.errors import HttpError
from coordinator.app import Coordinator
from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.core.structured import FIELD
from paceline.core.types import AcceptanceMode, SamplingParams, SpeculationParams, StructuredOutputs
from paceline.core.validation import AUTO
from paceline.rpc.codec import GenerateCall, generate_request_from_proto, generate_request_to_proto
from paceline.rpc.codec.generation import ContextLengthError
from paceline.v1 import common_pb2

MAX_METADATA_ENTRIES = 16
PLACEHOLDER_MODELS = ("tgi", "dummy")
"""Sent by clients of TGI and of the hub that know no model name."""
_VERSION = version("paceline")
"""Looked up once, because it is read from a file."""
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""vLLM's names for a structure before `structured_outputs`."""


def _shape_of_number_or_auto(value: Any) -> str:
    return "<auto>" if value == AUTO else shape_of(value)


def _or_auto(least: int, most: int) -> Discriminator:
    return Discriminator(
        _shape_of_number_or_auto,
        custom_error_type="alternatives",
        custom_error_message=f"must be an integer from {least} to {most}, or {AUTO}",
    )


_NumberOrAuto = Annotated[int, Tag("<number>")] | Annotated[Literal["auto"], Tag("<auto>")]
DraftTokens = Annotated[_NumberOrAuto, _or_auto(0, limits.MAX_SPECULATIVE_TOKENS)]
TreeWidth = Annotated[_NumberOrAuto, _or_auto(1, limits.MAX_TREE_WIDTH)]


class StreamOptions(Schema):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: bool | None = told("Usage so far in every event, and at the end.")


class SpeculativeDecoding(Schema):
    """Options of speculation for this request."""

    num_speculative_tokens: DraftTokens | None = told(
        "K; 0 switches drafting off, `auto` lets the server choose.",
        minimum=0,
        maximum=limits.MAX_SPECULATIVE_TOKENS,
    )
    acceptance: str | None = told(enum=[*(mode.value for mode in AcceptanceMode), None])
    drafter: str | None = told(
        "The only source of draft tokens: `draft`, or a context source such as `suffix`.",
        minLength=1,
        maxLength=limits.MAX_NAME_CHARACTERS,
    )
    prompt_lookup: bool | None = told(
        "True adds prompt lookup to the server's context sources, false forbids all of them."
    )
    prompt_lookup_min: int | None = told(
        "Shortest match that prompt lookup copies after.", minimum=1, maximum=limits.MAX_PROMPT_LOOKUP
    )
    prompt_lookup_max: int | None = told(
        "Longest match that prompt lookup compares.", minimum=1, maximum=limits.MAX_PROMPT_LOOKUP
    )
    draft_temperature: float | None = told(
        "Temperature at which the draft draws; not at temperature 0.",
        minimum=0,
        maximum=limits.MAX_TEMPERATURE,
    )
    draft_top_k: int | None = told("`top_k` where the draft draws.", minimum=-1, maximum=2**31 - 1)
    draft_top_p: float | None = told("`top_p` where the draft draws.", exclusiveMinimum=0, maximum=1)
    tree_width: TreeWidth | None = told(
        "Most children of a node of a draft tree; 1 is a chain, `auto` lets the server choose.",
        minimum=1,
        maximum=limits.MAX_TREE_WIDTH,
    )
    max_tree_nodes: int | None = told(
        "Most draft tokens of a round with a tree.", minimum=1, maximum=limits.MAX_TREE_NODES
    )
    drafts_per_sequence: int | None = told(
        "Draft workers that propose for one round.", minimum=1, maximum=limits.MAX_DRAFTS
    )


def _not_too_low(temperature: float) -> float:
    return limits.MIN_TEMPERATURE if 0 < temperature < limits.MIN_TEMPERATURE else temperature


Temperature = Annotated[float, AfterValidator(_not_too_low)]
"""The core refuses positive values too small to divide by; clients send them for nearly greedy sampling."""


class GenerationRequest(TolerantSchema):
    """Common fields of both endpoints. A field that is None takes the default of SamplingParams."""

    UNSUPPORTED: ClassVar[Mapping[str, Unsupported]] = GENERATION

    model: str | None = told("The served model, which null, an empty text, `tgi` and `dummy` also select.")
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
    guided_json: JsonSchemaValue | None = told("As `structured_outputs.json`.")
    guided_regex: str | None = told("As `structured_outputs.regex`.")
    guided_choice: Strings | None = told("As `structured_outputs.choice`.")
    guided_grammar: str | None = told("As `structured_outputs.grammar`.")
    n: int | None = told("Choices for each prompt.", minimum=1, maximum=limits.MAX_N)
    stream: bool | None = None
    stream_options: StreamOptions | None = told("Requires stream=true.")
    speculative_decoding: SpeculativeDecoding | None = None
    include_speculative_decoding: bool | None = told("Whether usage and choices say what speculation did.")
    skip_special_tokens: bool | None = told("Leave special tokens out of the text; the default.")
    add_special_tokens: bool | None = told(
        "Add the tokenizer's special tokens; the default except in a chat."
    )
    truncate_prompt_tokens: int | None = told(
        "Keep at most so many tokens of the prompt; -1 keeps as many as fit.",
        minimum=-1,
        maximum=limits.MAX_PROMPT_TOKENS,
    )
    truncation_side: Literal["left", "right"] | None = told("The end to cut off; left is the default.")
    return_token_ids: bool | None = told("Return the tokens of prompt and choices.")
    return_tokens_as_token_ids: bool | None = told("Name tokens of logprobs `token_id:N`.")
    cache_salt: str | None = told(
        "Requests with different salts never share cached prefixes.",
        maxLength=limits.MAX_CACHE_SALT_CHARACTERS,
    )
    user: Label | None = told("A label of the caller's, without effect and not stored.")
    session_id: Label | None = told("As `user`.")

    @property
    def names(self) -> dict[str, str]:
        """Maps a core field to its name in this request, if the names differ."""
        names = {f.name: f"speculative_decoding.{f.name}" for f in fields(SpeculationParams)}
        return names | self._structure_names

    @property
    def include_usage(self) -> bool:
        """True if the last event of a stream is the usage."""
        options = self.stream_options
        return options is not None and bool(options.include_usage or options.continuous_usage_stats)

    @property
    def tells_usage_so_far(self) -> bool:
        """True if every event of a stream has the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def sampling(self, defaults: Mapping[str, Any] | None = None, **own: Any) -> SamplingParams:
        """The core's parameters. Raises InvalidArgumentError naming the core field.

        Args:
            defaults: replace the defaults of SamplingParams for fields that the request leaves out.
            own: values that the endpoint sets for core fields.
        """
        names = {f.name for f in fields(SamplingParams)} & set(type(self).model_fields)
        given = {name: value for name in names if (value := getattr(self, name)) is not None} | own
        if self.logit_bias is not None:
            given["logit_bias"] = _token_bias(self.logit_bias)
        given["structured_outputs"] = self._structure()
        return SamplingParams(**{**(defaults or {}), **given})

    def _structure(self) -> StructuredOutputs | None:
        asked = self._structure_fields
        if len(asked) > 1:
            raise InvalidArgumentError(asked[-1], f"cannot be combined with {asked[0]}")
        match asked:
            case []:
                return None
            case ["structured_outputs"]:
                assert self.structured_outputs is not None
                return self.structured_outputs.value()
            case ["response_format"]:
                assert self.response_format is not None
                return structure_of(self.response_format)
        return StructuredOutputs(**{asked[0].removeprefix("guided_"): getattr(self, asked[0])})

    @property
    def _structure_fields(self) -> list[str]:
        """The fields that set a structure."""
        text = isinstance(self.response_format, TextFormat)
        names = ("structured_outputs", *_GUIDED, *(() if text else ("response_format",)))
        return [name for name in names if getattr(self, name) is not None]

    @property
    def _structure_names(self) -> dict[str, str]:
        """Maps the core's structure fields to their names in this request."""
        match self._structure_fields:
            case ["response_format"]:
                assert self.response_format is not None
                return format_names(self.response_format)
            case [name] if name in _GUIDED:
                return {f"{FIELD}.{name.removeprefix('guided_')}": name, FIELD: name}
        return {}

    @property
    def scores_only(self) -> bool:
        """True if the prompt is reported and nothing is generated."""
        return False

    @property
    def needs_model_length(self) -> bool:
        """True if only a target can tell whether the request fits."""
        asked = max(self.token_limit or 0, self.min_tokens or 0)
        return self.truncate_prompt_tokens == -1 or asked > limits.MAX_TOKENS

    @property
    def token_limit(self) -> int | None:
        """The core's `max_tokens`."""
        return self.max_tokens

    def check_length(self, coordinator: Coordinator) -> None:
        """Raises ContextLengthError if the request exceeds what the core accepts."""
        for name, wanted in (("max_tokens", self.token_limit), ("min_tokens", self.min_tokens)):
            if wanted is not None and wanted > limits.MAX_TOKENS:
                length = coordinator.target_info().max_model_len
                raise ContextLengthError(name, length, f"{wanted} after the prompt exceed it")

    def truncated(
        self, prompt: Sequence[int], max_tokens: int | None, coordinator: Coordinator
    ) -> tuple[int, ...]:
        """Cut a prompt to `truncate_prompt_tokens`. Raises InvalidArgumentError.

        If it is -1, the prompt leaves room for `max_tokens`, or for one token.
        """
        most = self.truncate_prompt_tokens
        if most is None:
            if self.truncation_side is not None:
                raise InvalidArgumentError("truncation_side", "requires truncate_prompt_tokens")
            return tuple(prompt)
        if most == 0 or most < -1:
            raise InvalidArgumentError("truncate_prompt_tokens", f"must be -1 or at least 1, got {most}")
        if most == -1:
            most = max(1, coordinator.target_info().max_model_len - (max_tokens or 1))
        return tuple(prompt[:most] if self.truncation_side == "right" else prompt[-most:])

    def speculation(self) -> SpeculationParams:
        """Raises InvalidArgumentError naming the core field."""
        if self.speculative_decoding is None:
            return SpeculationParams()
        return SpeculationParams(**self.speculative_decoding.model_dump())


def check_model(name: str | None, served: str) -> None:
    """Raises HttpError with OpenAI's code if the model is not the served one."""
    if name and name != served:
        message = f"model: this server serves {served} and no other model"
        raise HttpError(404, message, param="model", code="model_not_found")


def check_request_model(name: str | None, served: str) -> None:
    """Like `check_model`, for a request's body: TGI clients without a model name send a placeholder."""
    if name not in PLACEHOLDER_MODELS:
        check_model(name, served)


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
    """The common members of all objects of one answer.

    Raises HttpError for a model that is not served, InvalidArgumentError for stream options without a stream.
    """
    served = coordinator.model_name
    check_request_model(wanted.model, served)
    wanted.check_length(coordinator)
    options = wanted.stream_options
    if options is not None and not wanted.stream:
        raise InvalidArgumentError("stream_options", "requires stream=true")
    if options is not None and options.continuous_usage_stats and options.include_usage is False:
        raise InvalidArgumentError("stream_options.continuous_usage_stats", "requires include_usage")
    return {"id": f"{prefix}-{secrets.token_hex(16)}", "created": int(time.time()), "model": served}


def fingerprinted(head: Mapping[str, Any], coordinator: Coordinator) -> dict[str, Any]:
    """The common members of an answer's objects, once a target is there to answer."""
    return {**head, "system_fingerprint": fingerprint_of(coordinator.target_info())}


def fingerprint_of(info: common_pb2.WorkerInfo) -> str:
    """OpenAI's `system_fingerprint`: it changes whenever the same seed may give other tokens."""
    parts = (
        _VERSION,
        info.model,
        info.dtype,
        info.device,
        info.tokenizer_fingerprint,
        str(info.num_parameters),
    )
    return f"fp_{blake2b('|'.join(parts).encode(), digest_size=5).hexdigest()}"


def writer_of(wanted: GenerationRequest, coordinator: Coordinator) -> LogprobWriter:
    """The writer of an answer's log-probabilities."""
    return LogprobWriter(coordinator.vocabulary, names_by_id=bool(wanted.return_tokens_as_token_ids))


def make_call(
    request_id: str,
    prompt: str | tuple[int, ...],
    sampling: SamplingParams,
    speculation: SpeculationParams,
    cache_salt: str | None = None,
) -> GenerateCall:
    """The core's call. Raises InvalidArgumentError naming the core field.

    The call goes through the message of the gRPC API, so both APIs refuse the same requests with the same
    messages.
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
    """Like `make_call`, one call a prompt. Shared fields are checked once: they may name 32,768 tokens."""
    first = make_call(f"{request_id}-0", prompts[0], sampling, speculation, cache_salt)
    calls, plain = [first], SamplingParams()
    for index, prompt in enumerate(prompts[1:], 1):
        call = make_call(f"{request_id}-{index}", prompt, plain, speculation, cache_salt)
        calls.append(replace(call, sampling=first.sampling))
    return calls
