"""Between protobuf messages and core types: the one place that validates what came over the wire.

Every face (gRPC now, HTTP later) goes through here. A field this version does not know is refused with
its number, since a parameter that is silently ignored would change what the caller asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.core.types import (
    AcceptanceMode,
    FinishReason,
    Proposal,
    SamplingParams,
    SequenceParams,
    SparseDistribution,
    SpeculationParams,
    Timings,
    TokenOrigin,
    Verdict,
)
from paceline.v1 import common_pb2, draft_pb2, generation_pb2, target_pb2

PROTOCOL_VERSION = 1

_MODES = {
    AcceptanceMode.COUPLED: common_pb2.ACCEPTANCE_MODE_COUPLED,
    AcceptanceMode.REJECTION: common_pb2.ACCEPTANCE_MODE_REJECTION,
    AcceptanceMode.BLOCK: common_pb2.ACCEPTANCE_MODE_BLOCK,
}
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
_MODES_BACK: dict[int, AcceptanceMode] = {wire: mode for mode, wire in _MODES.items()}
_ORIGINS_BACK: dict[int, TokenOrigin] = {wire: origin for origin, wire in _ORIGINS.items()}
_REASONS_BACK: dict[int, FinishReason] = {wire: reason for reason, wire in _REASONS.items()}

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
)
UNLIMITED_MAX_TOKENS = -1
"""`max_tokens` on the wire for "up to the model's length"."""


def refuse_unknown_fields(message: Message, name: str) -> None:
    """Raise InvalidArgumentError if `message` carries a field this version does not define."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise InvalidArgumentError(name, f"unknown parameter (field number {unknown[0].field_number})")


def check_text(name: str, text: str) -> None:
    """Raises InvalidArgumentError for a lone surrogate, which no UTF-8 can carry."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(name, "is not valid Unicode text") from None


def check_wire_ids(name: str, token_ids: Iterable[int]) -> None:
    """Raises InvalidArgumentError if an id does not fit the wire's uint32."""
    for position, token_id in enumerate(token_ids):
        if not 0 <= token_id < 2**32:
            raise InvalidArgumentError(
                name, f"token id {token_id} at position {position} is outside [0, 2^32)"
            )


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    """Every field is set, so the receiver needs no defaults of its own.

    Raises InvalidArgumentError for a value that the wire's type cannot hold.
    """
    check_wire_ids("logit_bias", params.logit_bias)
    check_wire_ids("stop_token_ids", params.stop_token_ids)
    for text in params.stop:
        check_text("stop", text)
    message = common_pb2.SamplingParams(
        logit_bias=[
            common_pb2.LogitBias(token_id=token_id, bias=bias) for token_id, bias in params.logit_bias.items()
        ],
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
    )
    for name in _PLAIN_SAMPLING_FIELDS:
        value = getattr(params, name)
        if value is None:
            continue
        try:
            setattr(message, name, value)
        except (TypeError, ValueError):
            raise InvalidArgumentError(name, "does not fit the wire's type") from None
    if params.max_tokens is None:
        message.max_tokens = UNLIMITED_MAX_TOKENS
    return message


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """Raises InvalidArgumentError naming the field."""
    refuse_unknown_fields(message, "sampling")
    given = {descriptor.name for descriptor, _ in message.ListFields()}
    values = {name: getattr(message, name) for name in _PLAIN_SAMPLING_FIELDS if name in given}
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
        **values,
    )


def mode_to_proto(mode: AcceptanceMode) -> common_pb2.AcceptanceMode.ValueType:
    """The wire's number of an acceptance mode."""
    return _MODES[mode]


def mode_from_proto(value: int, name: str = "acceptance") -> AcceptanceMode:
    """Raises InvalidArgumentError for a number that names no mode."""
    if value not in _MODES_BACK:
        raise InvalidArgumentError(name, f"no acceptance mode has the number {value}")
    return _MODES_BACK[value]


def speculation_to_proto(params: SpeculationParams) -> generation_pb2.SpeculationParams:
    """Unset fields stay unset: they mean the server's setting."""
    message = generation_pb2.SpeculationParams()
    if params.num_speculative_tokens is not None:
        message.num_speculative_tokens = params.num_speculative_tokens
    if params.mode is not None:
        message.acceptance_mode = _MODES[params.mode]
    return message


def speculation_from_proto(message: generation_pb2.SpeculationParams) -> SpeculationParams:
    """Raises InvalidArgumentError naming the field."""
    refuse_unknown_fields(message, "speculation")
    k = message.num_speculative_tokens if message.HasField("num_speculative_tokens") else None
    unset = message.acceptance_mode == common_pb2.ACCEPTANCE_MODE_UNSPECIFIED
    return SpeculationParams(
        num_speculative_tokens=k, acceptance=None if unset else mode_from_proto(message.acceptance_mode)
    )


def sequence_params_to_proto(params: SequenceParams) -> common_pb2.SequenceParams:
    """What OpenSequence carries."""
    return common_pb2.SequenceParams(
        sampling=sampling_to_proto(params.sampling),
        acceptance_mode=_MODES[params.mode],
        prompt_length=params.prompt_length,
    )


def sequence_params_from_proto(message: common_pb2.SequenceParams) -> SequenceParams:
    """Raises InvalidArgumentError; a sequence without a seed cannot be sampled repeatably."""
    refuse_unknown_fields(message, "params")
    sampling = sampling_from_proto(message.sampling)
    if sampling.seed is None:
        raise InvalidArgumentError("seed", "a worker's sequence needs one")
    return SequenceParams(
        sampling=sampling,
        mode=mode_from_proto(message.acceptance_mode),
        prompt_length=message.prompt_length,
    )


def check_token_ids(name: str, token_ids: Iterable[int], vocabulary_size: int) -> None:
    """Raises InvalidArgumentError if an id is outside [0, vocabulary_size)."""
    for position, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocabulary_size:
            raise InvalidArgumentError(
                name,
                f"token id {token_id} at position {position} is outside the vocabulary of {vocabulary_size}",
            )


def check_opening(token_ids: Sequence[int], params: SequenceParams, vocabulary_size: int) -> None:
    """Refuse a sequence no worker could run. Raises InvalidArgumentError naming the field."""
    if not token_ids:
        raise InvalidArgumentError("token_ids", "a sequence needs at least one token")
    check_token_ids("token_ids", token_ids, vocabulary_size)
    check_token_ids("logit_bias", params.sampling.logit_bias, vocabulary_size)
    check_token_ids("stop_token_ids", params.sampling.stop_token_ids, vocabulary_size)


def proposal_to_proto(proposal: Proposal) -> common_pb2.Proposal:
    """Distributions are passed on as the bytes they are."""
    return common_pb2.Proposal(
        token_ids=proposal.token_ids,
        parents=proposal.parents,
        distributions=[
            common_pb2.SparseDistribution(token_ids=d.token_ids, probabilities=d.probabilities)
            for d in proposal.distributions
        ],
    )


def proposal_from_proto(message: common_pb2.Proposal) -> Proposal:
    """Check the shape of a proposal. Raises InvalidArgumentError naming the part.

    Whether ids lie in the vocabulary and probabilities are proper is the target worker's to check,
    where they become tensors.
    """
    refuse_unknown_fields(message, "proposal")
    token_ids = tuple(message.token_ids)
    if len(token_ids) > limits.MAX_SPECULATIVE_TOKENS:
        raise InvalidArgumentError(
            "proposal.token_ids", f"at most {limits.MAX_SPECULATIVE_TOKENS}, got {len(token_ids)}"
        )
    parents = tuple(message.parents)
    if parents and len(parents) != len(token_ids):
        raise InvalidArgumentError("proposal.parents", "must be empty or one entry a node")
    if any(not -1 <= parent < index for index, parent in enumerate(parents)):
        raise InvalidArgumentError("proposal.parents", "must be in topological order")
    if message.distributions and len(message.distributions) != len(token_ids):
        raise InvalidArgumentError("proposal.distributions", "must be empty or one entry a node")
    return Proposal(token_ids, parents, tuple(_sparse_from_proto(d) for d in message.distributions))


def _sparse_from_proto(message: common_pb2.SparseDistribution) -> SparseDistribution:
    refuse_unknown_fields(message, "proposal.distributions")
    size = len(message.token_ids)
    if size != len(message.probabilities) or size % 4 or not 0 < size // 4 <= limits.MAX_SUPPORT:
        raise InvalidArgumentError(
            "proposal.distributions",
            f"needs as many ids as probabilities, between 1 and {limits.MAX_SUPPORT}",
        )
    return SparseDistribution(message.token_ids, message.probabilities)


def _microseconds(seconds: float) -> int:
    return min(max(round(seconds * 1e6), 0), 2**32 - 1)


def timings_to_proto(timings: Timings) -> common_pb2.Timings:
    """Seconds to whole microseconds; more than the wire's 71 minutes counts as that."""
    return common_pb2.Timings(
        queue_us=_microseconds(timings.queue),
        compute_us=_microseconds(timings.compute),
        rows=timings.rows,
        sequences=timings.sequences,
    )


def timings_from_proto(message: common_pb2.Timings) -> Timings:
    """Whole microseconds to seconds."""
    return Timings(message.queue_us / 1e6, message.compute_us / 1e6, message.rows, message.sequences)


def verdict_to_proto(sequence_id: str, epoch: int, round_number: int, verdict: Verdict) -> target_pb2.Verdict:
    """A verdict with the address of the round it answers."""
    return target_pb2.Verdict(
        sequence_id=sequence_id,
        epoch=epoch,
        round=round_number,
        num_accepted=verdict.num_accepted,
        token_ids=verdict.token_ids,
        num_computed_tokens=verdict.num_computed_tokens,
        timings=timings_to_proto(verdict.timings),
    )


def verdict_from_proto(message: target_pb2.Verdict) -> Verdict:
    """Raises InvalidArgumentError if counts and tokens disagree."""
    if len(message.token_ids) != message.num_accepted + 1:
        raise InvalidArgumentError("verdict.token_ids", "must be the accepted tokens and the next one")
    return Verdict(
        num_accepted=message.num_accepted,
        token_ids=tuple(message.token_ids),
        num_computed_tokens=message.num_computed_tokens,
        timings=timings_from_proto(message.timings),
    )


def draft_proposal_to_proto(
    sequence_id: str,
    epoch: int,
    round_number: int,
    base_length: int,
    proposal: Proposal,
    num_computed_tokens: int,
    timings: Timings,
) -> draft_pb2.DraftProposal:
    """A proposal with the address of the round it answers."""
    return draft_pb2.DraftProposal(
        sequence_id=sequence_id,
        epoch=epoch,
        round=round_number,
        base_length=base_length,
        proposal=proposal_to_proto(proposal),
        num_computed_tokens=num_computed_tokens,
        timings=timings_to_proto(timings),
    )


def origin_to_proto(origin: TokenOrigin) -> generation_pb2.TokenOrigin.ValueType:
    """The wire's number of a token's origin."""
    return _ORIGINS[origin]


def origin_from_proto(value: int) -> TokenOrigin:
    """Raises InvalidArgumentError for a number that names none."""
    if value not in _ORIGINS_BACK:
        raise InvalidArgumentError("origins", f"no token origin has the number {value}")
    return _ORIGINS_BACK[value]


def finish_reason_to_proto(reason: FinishReason) -> generation_pb2.FinishReason.ValueType:
    """The wire's number of a finish reason."""
    return _REASONS[reason]


def finish_reason_from_proto(value: int) -> FinishReason:
    """Raises InvalidArgumentError for a number that names none."""
    if value not in _REASONS_BACK:
        raise InvalidArgumentError("finish_reason", f"no finish reason has the number {value}")
    return _REASONS_BACK[value]


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A client's request after validation of everything that needs no model."""

    request_id: str
    prompt: str | tuple[int, ...]
    sampling: SamplingParams
    speculation: SpeculationParams


def generate_request_to_proto(call: GenerateCall) -> generation_pb2.GenerateRequest:
    """What the SDK sends. Raises InvalidArgumentError for text or ids that the wire cannot carry."""
    check_text("request_id", call.request_id)
    message = generation_pb2.GenerateRequest(
        request_id=call.request_id,
        sampling=sampling_to_proto(call.sampling),
        speculation=speculation_to_proto(call.speculation),
    )
    if isinstance(call.prompt, str):
        check_text("prompt", call.prompt)
        message.text = call.prompt
    else:
        check_wire_ids("prompt", call.prompt)
        message.token_ids.ids.extend(call.prompt)
    return message


def generate_request_from_proto(message: generation_pb2.GenerateRequest) -> GenerateCall:
    """Raises InvalidArgumentError naming the field."""
    refuse_unknown_fields(message, "request")
    if len(message.request_id) > limits.MAX_REQUEST_ID_CHARACTERS:
        raise InvalidArgumentError("request_id", f"at most {limits.MAX_REQUEST_ID_CHARACTERS} characters")
    prompt: str | tuple[int, ...]
    match message.WhichOneof("prompt"):
        case "text":
            prompt = message.text
            if len(prompt) > limits.MAX_PROMPT_CHARACTERS:
                raise InvalidArgumentError("prompt", f"at most {limits.MAX_PROMPT_CHARACTERS} characters")
        case "token_ids":
            refuse_unknown_fields(message.token_ids, "prompt")
            prompt = tuple(message.token_ids.ids)
            if len(prompt) > limits.MAX_PROMPT_TOKENS:
                raise InvalidArgumentError("prompt", f"at most {limits.MAX_PROMPT_TOKENS} tokens")
        case _:
            raise InvalidArgumentError("prompt", "is required, as text or token ids")
    if not prompt:
        raise InvalidArgumentError("prompt", "must not be empty")
    return GenerateCall(
        request_id=message.request_id,
        prompt=prompt,
        sampling=sampling_from_proto(message.sampling),
        speculation=speculation_from_proto(message.speculation),
    )


def check_against_model(
    call: GenerateCall, prompt_length: int, vocabulary_size: int, max_model_len: int
) -> None:
    """What can only be judged with the model at hand. Raises InvalidArgumentError naming the field."""
    if not isinstance(call.prompt, str):
        check_token_ids("prompt", call.prompt, vocabulary_size)
    check_token_ids("stop_token_ids", call.sampling.stop_token_ids, vocabulary_size)
    check_token_ids("logit_bias", call.sampling.logit_bias, vocabulary_size)
    if prompt_length >= max_model_len:
        raise InvalidArgumentError(
            "prompt",
            f"has {prompt_length} tokens; the model's length of {max_model_len} leaves room for none",
        )
    wanted = call.sampling.max_tokens
    if wanted is not None and prompt_length + wanted > max_model_len:
        raise InvalidArgumentError(
            "max_tokens",
            f"{wanted} after a prompt of {prompt_length} tokens exceeds the model's length"
            f" of {max_model_len}",
        )
