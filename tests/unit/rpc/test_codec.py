"""The codec validates every message and names the field."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import Message
from harness.refusals import refused

from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.core.types import AcceptanceMode, SamplingParams, SpeculationParams, Timings
from paceline.rpc import codec
from paceline.v1 import common_pb2, generation_pb2, target_pb2

Sampling, Request, Proposal = (common_pb2.SamplingParams, generation_pb2.GenerateRequest, common_pb2.Proposal)
Bias, Sparse = common_pb2.LogitBias, common_pb2.SparseDistribution


in_request = codec.generate_request_from_proto


def request(**fields: Any) -> generation_pb2.GenerateRequest:
    return Request(**({"text": "x"} | fields))


def with_unknown_field(message: Message, number: int) -> Message:
    """The message as a newer sender would have it: one varint field more."""
    tag = number << 3
    encoded = bytearray()
    while tag > 127:
        encoded.append(tag & 127 | 128)
        tag >>= 7
    return type(message).FromString(message.SerializeToString() + bytes([*encoded, tag, 1]))


NAN, INF = math.nan, math.inf
OUT_OF_RANGE: dict[str, list[Any]] = {
    "temperature": [NAN, INF, -INF, -1.0, 1e-9, 101.0],
    "top_p": [NAN, INF, 0.0, -0.1, 1.1],
    "top_k": [-2, -(2**31)],
    "min_p": [NAN, -0.1, 1.1],
    "repetition_penalty": [NAN, INF, 0.0, 1e-38, -1.0, 101.0],
    "presence_penalty": [NAN, -2.1, 2.1],
    "frequency_penalty": [NAN, -2.1, 2.1],
    "logit_bias": [
        *([Bias(token_id=1, bias=bad)] for bad in (NAN, INF, -100.1, 100.1)),
        [Bias(token_id=1, bias=1), Bias(token_id=1)],
        [Bias(token_id=i) for i in range(limits.MAX_LOGIT_BIAS_ENTRIES + 1)],
    ],
    "max_tokens": [0, -2, limits.MAX_TOKENS + 1],
    "min_tokens": [-1, 17, limits.MAX_TOKENS + 1],
    "stop": [[""], ["a"] * (limits.MAX_STOP_STRINGS + 1), ["a" * (limits.MAX_STOP_STRING_CHARACTERS + 1)]],
    "stop_token_ids": [range(limits.MAX_STOP_TOKEN_IDS + 1)],
    "bad_words": [[""], ["a"] * (limits.MAX_BAD_WORDS + 1), ["a" * (limits.MAX_BAD_WORD_CHARACTERS + 1)]],
    "allowed_token_ids": [range(limits.MAX_ALLOWED_TOKEN_IDS + 1)],
    "n": [0, limits.MAX_N + 1, 2**32 - 1],
    "logprobs": [limits.MAX_LOGPROBS + 1],
    "prompt_logprobs": [limits.MAX_LOGPROBS + 1],
}


@pytest.mark.parametrize(
    ("name", "bad"),
    [(name, bad) for name, values in OUT_OF_RANGE.items() for bad in values],
    ids=lambda value: value if isinstance(value, str) else repr(value)[:40],
)
def test_sampling_out_of_range_names_its_field(name: str, bad: Any) -> None:
    sampling = Sampling(**{name: bad})
    with refused(name):
        codec.sampling_from_proto(sampling)
    with refused(name):
        in_request(request(sampling=sampling))


def test_unset_fields_have_the_documented_defaults() -> None:
    assert codec.sampling_from_proto(Sampling()) == SamplingParams()
    assert in_request(request()).sampling == SamplingParams()


def test_zero_differs_from_unset() -> None:
    params = codec.sampling_from_proto(Sampling(temperature=0, seed=0, min_p=0))
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
    with refused(name):
        codec.sampling_to_proto(SamplingParams(**values))


def in_params(word: Any) -> common_pb2.SequenceParams:
    """The sequence parameters that hold a tokenised bad word."""
    block = common_pb2.ACCEPTANCE_MODE_BLOCK
    return common_pb2.SequenceParams(
        sampling=Sampling(seed=1), acceptance_mode=block, bad_words_token_ids=[word]
    )


WITH_FIELDS: list[tuple[Message, Callable[[Any], Any], str]] = [
    (Sampling(), codec.sampling_from_proto, "sampling"),
    (generation_pb2.SpeculationParams(), codec.speculation_from_proto, "speculation"),
    (request(), in_request, "request"),
    (common_pb2.SequenceParams(), codec.sequence_params_from_proto, "params"),
    (Proposal(), codec.proposal_from_proto, "proposal"),
    (
        common_pb2.TokenSequence(token_ids=[1]),
        lambda word: codec.sequence_params_from_proto(in_params(word)),
        "bad_words",
    ),
    (generation_pb2.TokenIds(ids=[1]), lambda ids: in_request(Request(token_ids=ids)), "prompt"),
    (Bias(token_id=1), lambda entry: codec.sampling_from_proto(Sampling(logit_bias=[entry])), "logit_bias"),
    (
        Sparse(token_ids=b"1234", probabilities=b"1234"),
        lambda of_one: codec.proposal_from_proto(Proposal(token_ids=[1], distributions=[of_one])),
        "proposal.distributions",
    ),
    (Sampling(), lambda sampling: in_request(request(sampling=sampling)), "sampling"),
    (generation_pb2.SpeculationParams(), lambda it: in_request(request(speculation=it)), "speculation"),
]


@pytest.mark.parametrize("number", [100, 15_000])
@pytest.mark.parametrize(("message", "parse", "name"), WITH_FIELDS)
def test_unknown_fields_are_refused_with_their_number(
    message: Message, parse: Any, name: str, number: int
) -> None:
    with refused(name, rf"unknown parameter \(field number {number}\)"):
        parse(with_unknown_field(message, number))


def test_unknown_fields_in_answers_are_ignored() -> None:
    """A newer worker's additional field in an answer is not the coordinator's problem."""
    verdict = target_pb2.Verdict(num_accepted=0, token_ids=[5], num_computed_tokens=3)
    assert codec.verdict_from_proto(with_unknown_field(verdict, 100)).token_ids == (5,)


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
    with refused(name):
        codec.speculation_from_proto(generation_pb2.SpeculationParams(**fields))


def test_k_zero_differs_from_the_servers_setting() -> None:
    unset = codec.speculation_from_proto(generation_pb2.SpeculationParams())
    zero = codec.speculation_from_proto(generation_pb2.SpeculationParams(num_speculative_tokens=0))
    assert unset == SpeculationParams()
    assert zero.num_speculative_tokens == 0


@pytest.mark.parametrize(
    ("message", "name"),
    [
        (Request(), "prompt"),
        (Request(token_ids=generation_pb2.TokenIds()), "prompt"),
        (request(request_id="i" * (limits.MAX_REQUEST_ID_CHARACTERS + 1)), "request_id"),
        (request(cache_salt="i" * (limits.MAX_CACHE_SALT_CHARACTERS + 1)), "cache_salt"),
    ],
)
def test_invalid_requests_are_refused_by_field(message: Any, name: str) -> None:
    with refused(name):
        in_request(message)


def test_an_empty_text_is_left_to_the_tokenizer() -> None:
    """It may put a token before every text."""
    assert in_request(request(text="")).prompt == ""


def test_prompts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PROMPT_CHARACTERS", 3)
    monkeypatch.setattr(limits, "MAX_PROMPT_TOKENS", 3)
    assert in_request(request(text="abc")).prompt == "abc"
    ids = generation_pb2.TokenIds(ids=[1, 2, 3])
    assert in_request(Request(token_ids=ids)).prompt == (1, 2, 3)
    ids.ids.append(4)
    for message in (request(text="abcd"), Request(token_ids=ids)):
        with refused("prompt", "at most 3"):
            in_request(message)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sampling": None}, "seed"),
        ({"acceptance_mode": 0}, "acceptance"),
        ({"sampling": Sampling(seed=1, top_p=3)}, "top_p"),
        ({"cache_salt": "x" * (2 * limits.MAX_CACHE_SALT_CHARACTERS + 1)}, "cache_salt"),
    ],
)
def test_sequence_params_need_a_seed_and_a_mode(changes: dict[str, Any], field: str) -> None:
    values: dict[str, Any] = {
        "sampling": Sampling(seed=1),
        "acceptance_mode": common_pb2.ACCEPTANCE_MODE_BLOCK,
    }
    good = common_pb2.SequenceParams(**values)
    assert codec.sequence_params_from_proto(good).mode is AcceptanceMode.BLOCK
    with refused(field):
        codec.sequence_params_from_proto(common_pb2.SequenceParams(**(values | changes)))


NODE = Sparse(token_ids=b"\1\0\0\0", probabilities=b"\0\0\x80\x3f")
LISTED_AND_UNIFORM = Sparse(token_ids=NODE.token_ids, probabilities=NODE.probabilities, uniform_over=2)


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
        ({"token_ids": [1], "distributions": [Sparse()]}, "proposal.distributions"),
        ({"token_ids": [1], "distributions": [LISTED_AND_UNIFORM]}, "proposal.distributions"),
        *(
            (
                {"token_ids": [1], "distributions": [Sparse(token_ids=b"i" * a, probabilities=b"p" * b)]},
                "proposal.distributions",
            )
            for a, b in ((3, 3), (4, 8), (8, 4), (4, 0), (4 * limits.MAX_SUPPORT + 4,) * 2)
        ),
    ],
)
def test_malformed_proposals_are_refused(fields: dict[str, Any], name: str) -> None:
    with refused(name):
        codec.proposal_from_proto(Proposal(**fields))


def test_the_largest_proposal_is_accepted() -> None:
    k = limits.MAX_SPECULATIVE_TOKENS
    widest = Sparse(token_ids=b"i" * 4 * limits.MAX_SUPPORT, probabilities=b"p" * 4 * limits.MAX_SUPPORT)
    message = Proposal(token_ids=range(k), parents=range(-1, k - 1), distributions=[widest] * k)
    assert codec.proposal_from_proto(message).num_draft_tokens == k


@pytest.mark.parametrize(("accepted", "token_ids"), [(0, []), (1, [5]), (0, [5, 6]), (2**32 - 1, [5])])
def test_verdicts_with_contradictory_counts_are_refused(accepted: int, token_ids: list[int]) -> None:
    with refused("verdict.token_ids"):
        codec.verdict_from_proto(target_pb2.Verdict(num_accepted=accepted, token_ids=token_ids))


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
    with refused(field):
        codec.check_against_model(made, prompt_length, vocabulary_size=256, max_model_len=64)


def test_requests_just_within_the_model_pass() -> None:
    made = call((255,), max_tokens=63, stop_token_ids=(255,), logit_bias={255: 1.0})
    codec.check_against_model(made, 1, vocabulary_size=256, max_model_len=64)
    codec.check_against_model(call("x", max_tokens=None), 63, vocabulary_size=256, max_model_len=64)
    least = call("x", max_tokens=None, min_tokens=32)
    codec.check_against_model(least, 32, vocabulary_size=256, max_model_len=64)


@pytest.mark.parametrize(
    ("made", "field"),
    [
        (call("\ud800"), "prompt"),
        (replace(call("x"), request_id="\ud800"), "request_id"),
        (replace(call("x"), cache_salt="\ud800"), "cache_salt"),
        (call((2**32,)), "prompt"),
        (call((-1,)), "prompt"),
    ],
)
def test_unencodable_text_is_refused_by_field(made: codec.GenerateCall, field: str) -> None:
    with refused(field):
        codec.generate_request_to_proto(made)
