"""Conversion of sampling parameters between protobuf and core types, and checks common to all messages.

Unknown fields are refused, because ignoring a parameter silently would change the request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Sized
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.core.structured import FIELD as STRUCTURE
from paceline.core.types import AcceptanceMode, SamplingParams, SequenceParams, StructuredOutputs
from paceline.telemetry import traceparent
from paceline.v1 import common_pb2

_MODES = {
    AcceptanceMode.COUPLED: common_pb2.ACCEPTANCE_MODE_COUPLED,
    AcceptanceMode.REJECTION: common_pb2.ACCEPTANCE_MODE_REJECTION,
    AcceptanceMode.BLOCK: common_pb2.ACCEPTANCE_MODE_BLOCK,
}
_MODES_BACK: dict[int, AcceptanceMode] = {wire: mode for mode, wire in _MODES.items()}

_PLAIN_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "n",
    "logprobs",
    "prompt_logprobs",
    "echo",
)
_MOST = {
    "logit_bias": limits.MAX_LOGIT_BIAS_ENTRIES,
    "stop": limits.MAX_STOP_STRINGS,
    "stop_token_ids": limits.MAX_STOP_TOKEN_IDS,
    "bad_words": limits.MAX_BAD_WORDS,
    "allowed_token_ids": limits.MAX_ALLOWED_TOKEN_IDS,
}
_TOKEN_FIELDS = ("logit_bias", "stop_token_ids", "allowed_token_ids")
UNLIMITED_MAX_TOKENS = -1
"""`max_tokens` on the wire, meaning "up to the model's length"."""


def refuse_unknown_fields(message: Message, name: str) -> None:
    """Raise InvalidArgumentError if `message` has a field unknown to this version.

    In a large message, unknown fields of nested messages are refused too, and all unknown fields are
    discarded. The cost grows with the message, so check the sizes of its lists first.
    """
    size = message.ByteSize()
    if size > limits.MAX_UNKNOWN_FIELD_BYTES:
        message.DiscardUnknownFields()
        if message.ByteSize() != size:
            raise InvalidArgumentError(name, "has unknown parameters")
        return
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise InvalidArgumentError(name, f"unknown parameter (field number {unknown[0].field_number})")


def check_count(name: str, values: Sized, most: int) -> None:
    """Raises InvalidArgumentError for more than `most` values. Check a message's lists before reading
    them."""
    if len(values) > most:
        raise InvalidArgumentError(name, f"at most {most}, got {len(values)}")


def check_text(name: str, text: str) -> None:
    """Raises InvalidArgumentError for a lone surrogate, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(name, "is not valid Unicode text") from None


def _check_below(name: str, token_ids: Collection[int], bound: int, what: str) -> None:
    # Much faster than the loop below, which finds the offending id.
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < bound):
        return
    for position, token_id in enumerate(token_ids):
        if not 0 <= token_id < bound:
            message = f"token id {token_id} at position {position} is outside {what}"
            raise InvalidArgumentError(name, message)


def check_wire_ids(name: str, token_ids: Collection[int]) -> None:
    """Raises InvalidArgumentError if an id does not fit the wire's uint32."""
    _check_below(name, token_ids, 2**32, "[0, 2^32)")


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    """Convert with every field set, so that the receiver needs no defaults.

    Only `skip_special_tokens` is omitted if true, because older receivers refuse it.

    Raises InvalidArgumentError for a value that the wire's type cannot represent.
    """
    for name in _TOKEN_FIELDS:
        check_wire_ids(name, getattr(params, name) or ())
    for name in ("stop", "bad_words"):
        for text in getattr(params, name):
            check_text(name, text)
    message = common_pb2.SamplingParams(
        logit_bias=[common_pb2.LogitBias(token_id=i, bias=bias) for i, bias in params.logit_bias.items()],
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        bad_words=params.bad_words,
        allowed_token_ids=params.allowed_token_ids or (),
    )
    for name in _PLAIN_SAMPLING_FIELDS:
        value = getattr(params, name)
        if value is None:
            continue
        try:
            setattr(message, name, value)
        except (TypeError, ValueError):
            raise InvalidArgumentError(name, "does not fit the wire's type") from None
    if not params.skip_special_tokens:
        message.skip_special_tokens = False
    if params.max_tokens is None:
        message.max_tokens = UNLIMITED_MAX_TOKENS
    if params.structure is not None:
        message.structured_outputs.CopyFrom(structure_to_proto(params.structure))
    return message


def structure_to_proto(structure: StructuredOutputs) -> common_pb2.StructuredOutputs:
    """Raises InvalidArgumentError for text that UTF-8 cannot encode."""
    message = common_pb2.StructuredOutputs(disable_any_whitespace=structure.disable_any_whitespace)
    value: Any = getattr(structure, structure.kind)
    if structure.kind == "choice":
        for text in value:
            check_text(structure.field, text)
        message.choice.texts.extend(value)
        return message
    if structure.kind != "json_object":
        check_text(structure.field, value)
    setattr(message, structure.kind, value)
    return message


def structure_from_proto(message: common_pb2.StructuredOutputs) -> StructuredOutputs:
    """Raises InvalidArgumentError naming the field."""
    check_count(f"{STRUCTURE}.choice", message.choice.texts, limits.MAX_STRUCTURE_CHOICES)
    refuse_unknown_fields(message, STRUCTURE)
    refuse_unknown_fields(message.choice, f"{STRUCTURE}.choice")
    kind = message.WhichOneof("constraint")
    value: Any = () if kind is None else getattr(message, kind)
    given: dict[str, Any] = {} if kind is None else {kind: tuple(value.texts) if kind == "choice" else value}
    return StructuredOutputs(disable_any_whitespace=message.disable_any_whitespace, **given)


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """Raises InvalidArgumentError naming the field."""
    for name, most in _MOST.items():
        check_count(name, getattr(message, name), most)
    has_structure = message.HasField("structured_outputs")
    structure = structure_from_proto(message.structured_outputs) if has_structure else None
    refuse_unknown_fields(message, "sampling")
    given = {descriptor.name for descriptor, _ in message.ListFields()}
    plain = (*_PLAIN_SAMPLING_FIELDS, "skip_special_tokens")
    values = {name: getattr(message, name) for name in plain if name in given}
    if values.get("max_tokens") == UNLIMITED_MAX_TOKENS:
        values["max_tokens"] = None
    bias: dict[int, float] = {}
    for entry in message.logit_bias:
        refuse_unknown_fields(entry, "logit_bias")
        if entry.token_id in bias:
            raise InvalidArgumentError("logit_bias", f"token id {entry.token_id} is named twice")
        bias[entry.token_id] = entry.bias
    return SamplingParams(
        logit_bias=bias,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        bad_words=tuple(message.bad_words),
        allowed_token_ids=tuple(message.allowed_token_ids) or None,
        structured_outputs=structure,
        **values,
    )


def mode_to_proto(mode: AcceptanceMode) -> common_pb2.AcceptanceMode.ValueType:
    """The wire value of an acceptance mode."""
    return _MODES[mode]


def mode_from_proto(value: int, name: str = "acceptance") -> AcceptanceMode:
    """Raises InvalidArgumentError for an unknown value."""
    if value not in _MODES_BACK:
        raise InvalidArgumentError(name, f"no acceptance mode has the number {value}")
    return _MODES_BACK[value]


def sequence_params_to_proto(params: SequenceParams) -> common_pb2.SequenceParams:
    """Parameters for OpenSequence. Fields that only affect text are omitted, since workers produce no
    text."""
    sampling = sampling_to_proto(params.sampling)
    sampling.ClearField("skip_special_tokens")
    return common_pb2.SequenceParams(
        sampling=sampling,
        acceptance_mode=_MODES[params.mode],
        prompt_length=params.prompt_length,
        bad_words_token_ids=[
            common_pb2.TokenSequence(token_ids=token_ids) for token_ids in params.bad_words_token_ids
        ],
        cache_salt=params.cache_salt,
        traceparent=params.traceparent,
        draft_index=params.draft_index,
    )


def sequence_params_from_proto(message: common_pb2.SequenceParams) -> SequenceParams:
    """Raises InvalidArgumentError, also for a missing seed, without which sampling is not reproducible."""
    # Twice, because each word is sent with and without a leading space.
    check_count("bad_words", message.bad_words_token_ids, 2 * limits.MAX_BAD_WORDS)
    sampling = sampling_from_proto(message.sampling)
    refuse_unknown_fields(message, "params")
    if sampling.seed is None:
        raise InvalidArgumentError("seed", "is required for a worker's sequence")
    for sequence in message.bad_words_token_ids:
        refuse_unknown_fields(sequence, "bad_words")
        if not 1 <= len(sequence.token_ids) <= limits.MAX_BAD_WORD_TOKENS:
            bounds = f"must have 1 to {limits.MAX_BAD_WORD_TOKENS} tokens each"
            raise InvalidArgumentError("bad_words", bounds)
    bad_words = tuple(tuple(sequence.token_ids) for sequence in message.bad_words_token_ids)
    if len(message.cache_salt) > 2 * limits.MAX_CACHE_SALT_CHARACTERS:
        raise InvalidArgumentError("cache_salt", f"at most {2 * limits.MAX_CACHE_SALT_CHARACTERS} characters")
    if message.draft_index >= limits.MAX_DRAFTS:
        raise InvalidArgumentError("draft_index", f"must be below {limits.MAX_DRAFTS}")
    return SequenceParams(
        sampling=sampling,
        mode=mode_from_proto(message.acceptance_mode),
        prompt_length=message.prompt_length,
        bad_words_token_ids=bad_words,
        cache_salt=message.cache_salt,
        traceparent=_traceparent(message.traceparent),
        draft_index=message.draft_index,
    )


def _traceparent(text: str) -> str:
    if text and traceparent.parse(text) is None:
        raise InvalidArgumentError("traceparent", "is not a W3C trace context")
    return text


def check_token_ids(name: str, token_ids: Collection[int], vocabulary_size: int) -> None:
    """Raises InvalidArgumentError if an id is outside [0, vocabulary_size)."""
    _check_below(name, token_ids, vocabulary_size, f"the vocabulary of {vocabulary_size}")


def check_named_tokens(sampling: SamplingParams, vocabulary_size: int) -> None:
    """Raises InvalidArgumentError if a parameter names a token outside [0, vocabulary_size)."""
    for name in _TOKEN_FIELDS:
        check_token_ids(name, getattr(sampling, name) or (), vocabulary_size)


def check_choices_remain(params: SequenceParams, vocabulary_size: int, eos_token_ids: Iterable[int]) -> None:
    """Refuse combinations of masks that might leave no token in some context.

    Raises InvalidArgumentError naming the field.
    """
    sampling = params.sampling
    blocked = {token_ids[-1] for token_ids in params.bad_words_token_ids}
    if sampling.min_tokens:
        blocked.update(sampling.stop_token_ids, () if sampling.ignore_eos else eos_token_ids)
    if sampling.allowed_token_ids is not None:
        if blocked.issuperset(sampling.allowed_token_ids):
            raise InvalidArgumentError(
                "allowed_token_ids", "bad_words and min_tokens together may forbid all of them"
            )
    elif len(blocked) >= vocabulary_size:
        name = "bad_words" if params.bad_words_token_ids else "min_tokens"
        raise InvalidArgumentError(name, "may leave no token of the vocabulary")


def check_opening(
    token_ids: Sequence[int],
    params: SequenceParams,
    vocabulary_size: int,
    eos_token_ids: Iterable[int] = (),
) -> None:
    """Refuse a sequence that no worker could run. Raises InvalidArgumentError naming the field."""
    if not token_ids:
        raise InvalidArgumentError("token_ids", "must have at least one token")
    check_token_ids("token_ids", token_ids, vocabulary_size)
    check_named_tokens(params.sampling, vocabulary_size)
    for sequence in params.bad_words_token_ids:
        check_token_ids("bad_words", sequence, vocabulary_size)
    check_choices_remain(params, vocabulary_size, eos_token_ids)
