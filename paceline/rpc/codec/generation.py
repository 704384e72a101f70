"""Conversion of clients' requests between protobuf and core types, for the gRPC and HTTP APIs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.core.types import FinishReason, SamplingParams, SpeculationParams, TokenOrigin
from paceline.core.validation import AUTO, DraftTokens, TreeWidth
from paceline.rpc.codec.resume import Resumption, resumption_from_proto, resumption_to_proto
from paceline.rpc.codec.sampling import (
    check_named_tokens,
    check_text,
    check_token_ids,
    check_wire_ids,
    mode_from_proto,
    mode_to_proto,
    refuse_unknown_fields,
    sampling_from_proto,
    sampling_to_proto,
)
from paceline.v1 import common_pb2, generation_pb2

_ORIGINS = {
    TokenOrigin.ACCEPTED: generation_pb2.TOKEN_ORIGIN_ACCEPTED,
    TokenOrigin.CORRECTION: generation_pb2.TOKEN_ORIGIN_CORRECTION,
    TokenOrigin.BONUS: generation_pb2.TOKEN_ORIGIN_BONUS,
    TokenOrigin.TARGET: generation_pb2.TOKEN_ORIGIN_TARGET,
}
_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}
_ORIGINS_BACK: dict[int, TokenOrigin] = {wire: origin for origin, wire in _ORIGINS.items()}
_REASONS_BACK: dict[int, FinishReason] = {wire: reason for reason, wire in _REASONS.items()}


_OF_THE_DRAFT: Final = ("draft_temperature", "draft_top_k", "draft_top_p")
_POSITIVE: Final = ("prompt_lookup_min", "prompt_lookup_max", "max_tree_nodes", "drafts_per_sequence")
"""Fields of which 0 on the wire means the server's setting."""


def speculation_to_proto(params: SpeculationParams) -> generation_pb2.SpeculationParams:
    """Unset fields stay unset and mean the server's setting."""
    message = generation_pb2.SpeculationParams()
    if params.num_speculative_tokens == AUTO:
        message.auto_num_speculative_tokens = True
    elif params.num_speculative_tokens is not None:
        message.num_speculative_tokens = params.num_speculative_tokens
    if params.mode is not None:
        message.acceptance_mode = mode_to_proto(params.mode)
    if params.prompt_lookup is not None:
        message.prompt_lookup = params.prompt_lookup
    message.drafter = params.drafter or ""
    if params.tree_width == AUTO:
        message.auto_tree_width = True
    elif params.tree_width is not None:
        message.tree_width = params.tree_width
    for name in _POSITIVE:
        setattr(message, name, getattr(params, name) or 0)
    for name in _OF_THE_DRAFT:
        if (value := getattr(params, name)) is not None:
            setattr(message, name, value)
    return message


def speculation_from_proto(message: generation_pb2.SpeculationParams) -> SpeculationParams:
    """Raises InvalidArgumentError naming the field."""
    refuse_unknown_fields(message, "speculation")
    k: DraftTokens | None = None
    if message.HasField("num_speculative_tokens"):
        k = message.num_speculative_tokens
    if message.auto_num_speculative_tokens:
        if k is not None:
            raise InvalidArgumentError("num_speculative_tokens", f"cannot be {k} and {AUTO!r}")
        k = AUTO
    unset = message.acceptance_mode == common_pb2.ACCEPTANCE_MODE_UNSPECIFIED
    return SpeculationParams(
        num_speculative_tokens=k,
        acceptance=None if unset else mode_from_proto(message.acceptance_mode),
        drafter=message.drafter or None,
        prompt_lookup=message.prompt_lookup if message.HasField("prompt_lookup") else None,
        tree_width=_tree_width_from_proto(message),
        **{name: getattr(message, name) or None for name in _POSITIVE},
        **{name: getattr(message, name) for name in _OF_THE_DRAFT if message.HasField(name)},
    )


def _tree_width_from_proto(message: generation_pb2.SpeculationParams) -> TreeWidth | None:
    if message.auto_tree_width and message.tree_width:
        raise InvalidArgumentError("tree_width", f"cannot be {message.tree_width} and {AUTO!r}")
    return AUTO if message.auto_tree_width else message.tree_width or None


def origin_to_proto(origin: TokenOrigin) -> generation_pb2.TokenOrigin.ValueType:
    """The wire value of a token's origin."""
    return _ORIGINS[origin]


def origin_from_proto(value: int) -> TokenOrigin:
    """Raises InvalidArgumentError for an unknown value."""
    if value not in _ORIGINS_BACK:
        raise InvalidArgumentError("origins", f"no token origin has the number {value}")
    return _ORIGINS_BACK[value]


def finish_reason_to_proto(reason: FinishReason) -> generation_pb2.FinishReason.ValueType:
    """The wire value of a finish reason."""
    return _REASONS[reason]


def finish_reason_from_proto(value: int) -> FinishReason:
    """Raises InvalidArgumentError for an unknown value."""
    if value not in _REASONS_BACK:
        raise InvalidArgumentError("finish_reason", f"no finish reason has the number {value}")
    return _REASONS_BACK[value]


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A client's request after all validation that needs no model."""

    request_id: str
    prompt: str | tuple[int, ...]
    sampling: SamplingParams
    speculation: SpeculationParams
    cache_salt: str = ""
    """Requests with different salts never share cached prefixes."""
    resumable: bool = False
    """The request is held for some time after its client's connection is lost."""
    resumption: Resumption | None = None
    """The client's position if it resumes a request; None for a new request."""


def generate_request_to_proto(call: GenerateCall) -> generation_pb2.GenerateRequest:
    """The SDK's message. Raises InvalidArgumentError for text or ids that the wire cannot carry."""
    check_text("request_id", call.request_id)
    check_text("cache_salt", call.cache_salt)
    message = generation_pb2.GenerateRequest(
        request_id=call.request_id,
        sampling=sampling_to_proto(call.sampling),
        speculation=speculation_to_proto(call.speculation),
        cache_salt=call.cache_salt,
        resumable=call.resumable,
    )
    resumption_to_proto(call.resumption, message)
    if isinstance(call.prompt, str):
        check_text("prompt", call.prompt)
        message.text = call.prompt
    else:
        check_wire_ids("prompt", call.prompt)
        message.token_ids.ids.extend(call.prompt)
    return message


def generate_request_from_proto(message: generation_pb2.GenerateRequest) -> GenerateCall:
    """Raises InvalidArgumentError naming the field."""
    sampling = sampling_from_proto(message.sampling)
    resumption = resumption_from_proto(message, sampling.n)
    refuse_unknown_fields(message, "request")
    if len(message.request_id) > limits.MAX_REQUEST_ID_CHARACTERS:
        raise InvalidArgumentError("request_id", f"at most {limits.MAX_REQUEST_ID_CHARACTERS} characters")
    if len(message.cache_salt) > limits.MAX_CACHE_SALT_CHARACTERS:
        raise InvalidArgumentError("cache_salt", f"at most {limits.MAX_CACHE_SALT_CHARACTERS} characters")
    prompt: str | tuple[int, ...]
    match message.WhichOneof("prompt"):
        case "text":
            prompt = message.text
            if len(prompt) > limits.MAX_PROMPT_CHARACTERS:
                raise InvalidArgumentError("prompt", f"at most {limits.MAX_PROMPT_CHARACTERS} characters")
        case "token_ids":
            refuse_unknown_fields(message.token_ids, "prompt")
            if not message.token_ids.ids:
                raise InvalidArgumentError("prompt", "must not be empty")
            if len(message.token_ids.ids) > limits.MAX_PROMPT_TOKENS:
                raise InvalidArgumentError("prompt", f"at most {limits.MAX_PROMPT_TOKENS} tokens")
            prompt = tuple(message.token_ids.ids)
        case _:
            raise InvalidArgumentError("prompt", "is required, as text or token ids")
    return GenerateCall(
        request_id=message.request_id,
        prompt=prompt,
        sampling=sampling,
        speculation=speculation_from_proto(message.speculation),
        cache_salt=message.cache_salt,
        resumable=message.resumable,
        resumption=resumption,
    )


class ContextLengthError(InvalidArgumentError):
    """A request exceeds the model's length. Clients receive it as an InvalidArgumentError."""

    def __init__(self, field: str, max_model_len: int, excess: str) -> None:
        """`excess` says what is too long. Client programs match the text before it, so that must not
        change."""
        super().__init__(field, f"this model's maximum context length is {max_model_len} tokens; {excess}")


def check_against_model(
    call: GenerateCall, prompt_length: int, vocabulary_size: int, max_model_len: int
) -> None:
    """Validation that requires the model's properties.

    Raises InvalidArgumentError naming the field, or ContextLengthError if prompt and answer are too long.
    """
    if not isinstance(call.prompt, str):
        check_token_ids("prompt", call.prompt, vocabulary_size)
    check_named_tokens(call.sampling, vocabulary_size)
    for token_ids in call.resumption.received if call.resumption is not None else ():
        check_token_ids("received", token_ids, vocabulary_size)
    if prompt_length >= max_model_len:
        raise ContextLengthError(
            "prompt", max_model_len, f"a prompt of {prompt_length} leaves no room for an answer"
        )
    reported = call.sampling.prompt_logprobs
    if reported is not None and prompt_length * (reported + 1) > limits.MAX_PROMPT_LOGPROBS:
        raise InvalidArgumentError(
            "prompt_logprobs", f"at most {limits.MAX_PROMPT_LOGPROBS} in all, for {prompt_length} tokens"
        )
    # Without max_tokens, the answer may fill the remaining length, but min_tokens must still fit.
    for field, wanted in (("max_tokens", call.sampling.max_tokens), ("min_tokens", call.sampling.min_tokens)):
        if wanted is not None and prompt_length + wanted > max_model_len:
            raise ContextLengthError(
                field, max_model_len, f"{wanted} after a prompt of {prompt_length} exceed it"
            )
