"""The codec validates every message and names the field."""

from __future__ import annotations

import math
from typing import Any

import pytest
from google.protobuf.message import Message

from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.core.types import AcceptanceMode, SamplingParams, SpeculationParams, Timings
from paceline.rpc import codec
from paceline.v1 import common_pb2, generation_pb2, target_pb2


def sampling_fields(**fields: Any) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(**fields)


def request(**fields: Any) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(**({"text": "x"} | fields))


def with_unknown_field(message: Message, number: int) -> Message:
    """The message as a newer sender would have it: one varint field more."""
    tag = number << 3
    encoded = bytearray()
    while tag > 127:
        encoded.append(tag & 127 | 128)
        tag >>= 7
    return type(message).FromString(message.SerializeToString() + bytes([*encoded, tag, 1]))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        *(
            ({"temperature": bad}, "temperature")
            for bad in (math.nan, math.inf, -math.inf, -1.0, 1e-9, 101.0)
        ),
        *(({"top_p": bad}, "top_p") for bad in (math.nan, math.inf, 0.0, -0.1, 1.1)),
        *(({"top_k": bad}, "top_k") for bad in (-2, -(2**31))),
        *(({"min_p": bad}, "min_p") for bad in (math.nan, -0.1, 1.1)),
        *(
            ({"repetition_penalty": bad}, "repetition_penalty")
            for bad in (math.nan, math.inf, 0.0, 1e-38, -1.0, 101.0)
        ),
        *(({"presence_penalty": bad}, "presence_penalty") for bad in (math.nan, -2.1, 2.1)),
        *(({"frequency_penalty": bad}, "frequency_penalty") for bad in (math.nan, -2.1, 2.1)),
        *(
            ({"logit_bias": [common_pb2.LogitBias(token_id=1, bias=bad)]}, "logit_bias")
            for bad in (math.nan, math.inf, -100.1, 100.1)
        ),
        (
            {"logit_bias": [common_pb2.LogitBias(token_id=1, bias=1), common_pb2.LogitBias(token_id=1)]},
            "logit_bias",
        ),
        (
            {
                "logit_bias": [
                    common_pb2.LogitBias(token_id=i) for i in range(limits.MAX_LOGIT_BIAS_ENTRIES + 1)
                ]
            },
            "logit_bias",
        ),
        *(({"max_tokens": bad}, "max_tokens") for bad in (0, -2, limits.MAX_TOKENS + 1)),
        *(({"min_tokens": bad}, "min_tokens") for bad in (-1, 17, limits.MAX_TOKENS + 1)),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * (limits.MAX_STOP_STRINGS + 1)}, "stop"),
        ({"stop": ["a" * (limits.MAX_STOP_STRING_CHARACTERS + 1)]}, "stop"),
        ({"stop_token_ids": list(range(limits.MAX_STOP_TOKEN_IDS + 1))}, "stop_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["a"] * (limits.MAX_BAD_WORDS + 1)}, "bad_words"),
        ({"bad_words": ["a" * (limits.MAX_BAD_WORD_CHARACTERS + 1)]}, "bad_words"),
        ({"allowed_token_ids": list(range(limits.MAX_ALLOWED_TOKEN_IDS + 1))}, "allowed_token_ids"),
        *(({"n": bad}, "n") for bad in (0, limits.MAX_N + 1, 2**32 - 1)),
        *(({name: limits.MAX_LOGPROBS + 1}, name) for name in ("logprobs", "prompt_logprobs")),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_sampling_out_of_range_names_its_field(fields: dict[str, Any], name: str) -> None:
    for parse in (
        lambda: codec.sampling_from_proto(sampling_fields(**fields)),
        lambda: codec.generate_request_from_proto(request(sampling=sampling_fields(**fields))),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            parse()
        assert caught.value.field == name


def test_unset_fields_have_the_documented_defaults() -> None:
    assert codec.sampling_from_proto(common_pb2.SamplingParams()) == SamplingParams()
    assert codec.generate_request_from_proto(request()).sampling == SamplingParams()


def test_zero_differs_from_unset() -> None:
    params = codec.sampling_from_proto(sampling_fields(temperature=0, seed=0, min_p=0))
    assert params.greedy
    assert params.seed == 0


def test_every_field_of_the_message_is_read() -> None:
    """A forgotten field would be ignored silently."""
    names = {field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields}
    assert names == set(SamplingParams.__dataclass_fields__)


def test_unlimited_max_tokens_round_trips() -> None:
    message = codec.sampling_to_proto(SamplingParams(max_tokens=None))
    assert message.max_tokens == codec.UNLIMITED_MAX_TOKENS
    assert codec.sampling_from_proto(message).max_tokens is None


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"top_k": 2**31}, "top_k"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"stop_token_ids": (2**32,)}, "stop_token_ids"),
        ({"logit_bias": {2**32: 1.0}}, "logit_bias"),
        ({"stop": ("\ud800",)}, "stop"),
        ({"bad_words": ("\ud800",)}, "bad_words"),
        ({"structured_outputs": {"json": {"const": "\ud800"}}}, "structured_outputs.json"),
        ({"allowed_token_ids": (2**32,)}, "allowed_token_ids"),
    ],
)
def test_values_the_wire_cannot_hold_are_named(values: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        codec.sampling_to_proto(SamplingParams(**values))
    assert caught.value.field == name


@pytest.mark.parametrize("number", [100, 15_000])
@pytest.mark.parametrize(
    ("message", "parse", "name"),
    [
        (common_pb2.SamplingParams(), codec.sampling_from_proto, "sampling"),
        (generation_pb2.SpeculationParams(), codec.speculation_from_proto, "speculation"),
        (generation_pb2.GenerateRequest(text="x"), codec.generate_request_from_proto, "request"),
        (common_pb2.SequenceParams(), codec.sequence_params_from_proto, "params"),
        (common_pb2.Proposal(), codec.proposal_from_proto, "proposal"),
        (
            common_pb2.TokenSequence(token_ids=[1]),
            lambda word: codec.sequence_params_from_proto(
                common_pb2.SequenceParams(
                    sampling=common_pb2.SamplingParams(seed=1),
                    acceptance_mode=common_pb2.ACCEPTANCE_MODE_BLOCK,
                    bad_words_token_ids=[word],
                )
            ),
            "bad_words",
        ),
        (
            generation_pb2.TokenIds(ids=[1]),
            lambda ids: codec.generate_request_from_proto(generation_pb2.GenerateRequest(token_ids=ids)),
            "prompt",
        ),
        (
            common_pb2.LogitBias(token_id=1),
            lambda entry: codec.sampling_from_proto(common_pb2.SamplingParams(logit_bias=[entry])),
            "logit_bias",
        ),
        (
            common_pb2.SparseDistribution(token_ids=b"1234", probabilities=b"1234"),
            lambda d: codec.proposal_from_proto(common_pb2.Proposal(token_ids=[1], distributions=[d])),
            "proposal.distributions",
        ),
        (
            common_pb2.SamplingParams(),
            lambda s: codec.generate_request_from_proto(request(sampling=s)),
            "sampling",
        ),
        (
            generation_pb2.SpeculationParams(),
            lambda s: codec.generate_request_from_proto(request(speculation=s)),
            "speculation",
        ),
    ],
)
def test_unknown_fields_are_refused_with_their_number(
    message: Message, parse: Any, name: str, number: int
) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"unknown parameter \(field number {number}\)") as caught:
        parse(with_unknown_field(message, number))
    assert caught.value.field == name


def test_unknown_fields_in_answers_are_ignored() -> None:
    """A newer worker's additional field in an answer is not the coordinator's problem."""
    verdict = target_pb2.Verdict(num_accepted=0, token_ids=[5], num_computed_tokens=3)
    assert codec.verdict_from_proto(with_unknown_field(verdict, 100)).token_ids == (5,)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"num_speculative_tokens": limits.MAX_SPECULATIVE_TOKENS + 1}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 2**32 - 1}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 0, "auto_num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"acceptance_mode": 9}, "acceptance"),
        ({"acceptance_mode": -1}, "acceptance"),
    ],
)
def test_speculation_out_of_range_names_its_field(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        codec.speculation_from_proto(generation_pb2.SpeculationParams(**fields))
    assert caught.value.field == name


def test_k_zero_differs_from_the_servers_setting() -> None:
    unset = codec.speculation_from_proto(generation_pb2.SpeculationParams())
    zero = codec.speculation_from_proto(generation_pb2.SpeculationParams(num_speculative_tokens=0))
    assert unset == SpeculationParams()
    assert zero.num_speculative_tokens == 0


@pytest.mark.parametrize(
    ("message", "name"),
    [
        (generation_pb2.GenerateRequest(), "prompt"),
        (generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds()), "prompt"),
        (
            generation_pb2.GenerateRequest(text="x", request_id="i" * (limits.MAX_REQUEST_ID_CHARACTERS + 1)),
            "request_id",
        ),
        (
            generation_pb2.GenerateRequest(text="x", cache_salt="i" * (limits.MAX_CACHE_SALT_CHARACTERS + 1)),
            "cache_salt",
        ),
    ],
)
def test_invalid_requests_are_refused_by_field(message: Any, name: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        codec.generate_request_from_proto(message)
    assert caught.value.field == name


def test_an_empty_text_is_left_to_the_tokenizer() -> None:
    """It may put a token before every text."""
    assert codec.generate_request_from_proto(request(text="")).prompt == ""


def test_prompts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PROMPT_CHARACTERS", 3)
    monkeypatch.setattr(limits, "MAX_PROMPT_TOKENS", 3)
    assert codec.generate_request_from_proto(request(text="abc")).prompt == "abc"
    ids = generation_pb2.TokenIds(ids=[1, 2, 3])
    assert codec.generate_request_from_proto(generation_pb2.GenerateRequest(token_ids=ids)).prompt == (
        1,
        2,
        3,
    )
    ids.ids.append(4)
    for message in (request(text="abcd"), generation_pb2.GenerateRequest(token_ids=ids)):
        with pytest.raises(InvalidArgumentError, match="at most 3") as caught:
            codec.generate_request_from_proto(message)
        assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sampling": None}, "seed"),
        ({"acceptance_mode": 0}, "acceptance"),
        ({"sampling": common_pb2.SamplingParams(seed=1, top_p=3)}, "top_p"),
        ({"cache_salt": "x" * (2 * limits.MAX_CACHE_SALT_CHARACTERS + 1)}, "cache_salt"),
    ],
)
def test_sequence_params_need_a_seed_and_a_mode(changes: dict[str, Any], field: str) -> None:
    values = {
        "sampling": common_pb2.SamplingParams(seed=1),
        "acceptance_mode": common_pb2.ACCEPTANCE_MODE_BLOCK,
    }
    good = common_pb2.SequenceParams(**values)  # type: ignore[arg-type]
    assert codec.sequence_params_from_proto(good).mode is AcceptanceMode.BLOCK
    with pytest.raises(InvalidArgumentError) as caught:
        codec.sequence_params_from_proto(common_pb2.SequenceParams(**(values | changes)))
    assert caught.value.field == field


NODE = common_pb2.SparseDistribution(token_ids=b"\1\0\0\0", probabilities=b"\0\0\x80\x3f")
LISTED_AND_UNIFORM = common_pb2.SparseDistribution(
    token_ids=NODE.token_ids, probabilities=NODE.probabilities, uniform_over=2
)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"token_ids": range(limits.MAX_SPECULATIVE_TOKENS + 1)}, "proposal.token_ids"),
        ({"token_ids": [1, 2], "parents": [-1]}, "proposal.parents"),
        ({"parents": [-1]}, "proposal.parents"),
        ({"token_ids": [1, 2], "parents": [-1, 1]}, "proposal.parents"),
        ({"token_ids": [1, 2], "parents": [0, 0]}, "proposal.parents"),
        ({"token_ids": [1, 2], "parents": [-2, 0]}, "proposal.parents"),
        ({"token_ids": [1, 2], "distributions": [NODE]}, "proposal.distributions"),
        ({"distributions": [NODE]}, "proposal.distributions"),
        ({"token_ids": [1], "distributions": [common_pb2.SparseDistribution()]}, "proposal.distributions"),
        ({"token_ids": [1], "distributions": [LISTED_AND_UNIFORM]}, "proposal.distributions"),
        *(
            (
                {
                    "token_ids": [1],
                    "distributions": [
                        common_pb2.SparseDistribution(token_ids=b"i" * a, probabilities=b"p" * b)
                    ],
                },
                "proposal.distributions",
            )
            for a, b in (
                (3, 3),
                (4, 8),
                (8, 4),
                (4, 0),
                (4 * limits.MAX_SUPPORT + 4, 4 * limits.MAX_SUPPORT + 4),
            )
        ),
    ],
)
def test_malformed_proposals_are_refused(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        codec.proposal_from_proto(common_pb2.Proposal(**fields))
    assert caught.value.field == name


def test_the_largest_proposal_is_accepted() -> None:
    k = limits.MAX_SPECULATIVE_TOKENS
    widest = common_pb2.SparseDistribution(
        token_ids=b"i" * 4 * limits.MAX_SUPPORT, probabilities=b"p" * 4 * limits.MAX_SUPPORT
    )
    message = common_pb2.Proposal(token_ids=range(k), parents=range(-1, k - 1), distributions=[widest] * k)
    assert codec.proposal_from_proto(message).num_draft_tokens == k


@pytest.mark.parametrize(("accepted", "token_ids"), [(0, []), (1, [5]), (0, [5, 6]), (2**32 - 1, [5])])
def test_verdicts_with_contradictory_counts_are_refused(accepted: int, token_ids: list[int]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        codec.verdict_from_proto(target_pb2.Verdict(num_accepted=accepted, token_ids=token_ids))
    assert caught.value.field == "verdict.token_ids"


@pytest.mark.parametrize(
    "parse", [codec.mode_from_proto, codec.origin_from_proto, codec.finish_reason_from_proto]
)
@pytest.mark.parametrize("number", [-1, 0, 99])
def test_unknown_enum_numbers_are_refused(parse: Any, number: int) -> None:
    with pytest.raises(InvalidArgumentError, match=str(number)):
        parse(number)


def test_timings_saturate() -> None:
    """Two hours in a queue must not make an answer unsendable."""
    message = codec.timings_to_proto(Timings(queue=7200.0, compute=-1e-9))
    assert (message.queue_us, message.compute_us) == (2**32 - 1, 0)


def call(prompt: Any = (1, 2), **sampling: Any) -> codec.GenerateCall:
    return codec.GenerateCall("", prompt, SamplingParams(**sampling), SpeculationParams())


@pytest.mark.parametrize(
    ("made", "prompt_length", "field"),
    [
        (call((1, 256)), 2, "prompt"),
        (call(stop_token_ids=(256,)), 2, "stop_token_ids"),
        (call(logit_bias={256: 1.0}), 2, "logit_bias"),
        (call("x", max_tokens=None), 64, "prompt"),
        (call("x", max_tokens=1), 65, "prompt"),
        (call("x", max_tokens=33), 32, "max_tokens"),
        (call("x", max_tokens=None, min_tokens=33), 32, "min_tokens"),
    ],
)
def test_requests_beyond_the_model_are_refused_by_field(
    made: codec.GenerateCall, prompt_length: int, field: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        codec.check_against_model(made, prompt_length, vocabulary_size=256, max_model_len=64)
    assert caught.value.field == field


def test_requests_just_within_the_model_pass() -> None:
    made = call((255,), max_tokens=63, stop_token_ids=(255,), logit_bias={255: 1.0})
    codec.check_against_model(made, 1, vocabulary_size=256, max_model_len=64)
    codec.check_against_model(call("x", max_tokens=None), 63, vocabulary_size=256, max_model_len=64)
    least = call("x", max_tokens=None, min_tokens=32)
    codec.check_against_model(least, 32, vocabulary_size=256, max_model_len=64)


def test_unencodable_text_is_refused_by_field() -> None:
    for made, field in (
        (codec.GenerateCall("", "\ud800", SamplingParams(), SpeculationParams()), "prompt"),
        (codec.GenerateCall("\ud800", "x", SamplingParams(), SpeculationParams()), "request_id"),
        (codec.GenerateCall("", "x", SamplingParams(), SpeculationParams(), "\ud800"), "cache_salt"),
        (codec.GenerateCall("", (2**32,), SamplingParams(), SpeculationParams()), "prompt"),
        (codec.GenerateCall("", (-1,), SamplingParams(), SpeculationParams()), "prompt"),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            codec.generate_request_to_proto(made)
        assert caught.value.field == field
