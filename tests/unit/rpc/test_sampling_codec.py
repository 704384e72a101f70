"""Sampling parameters, reports and conversations, checked against the wire and the vocabulary."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness.refusals import refused

from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.core.types import AcceptanceMode, SamplingParams, SequenceParams, SpeculationParams, Timings
from paceline.rpc import codec
from paceline.rpc.codec import (
    sampling_from_proto,
    sampling_to_proto,
    sequence_params_to_proto,
    timings_from_proto,
    timings_to_proto,
)
from paceline.rpc.codec.chat import ChatCall, chat_from_proto, chat_to_proto
from paceline.v1 import common_pb2, target_pb2
from paceline.v1 import generation_pb2 as pb


def params_message(**fields: Any) -> common_pb2.SequenceParams:
    block = common_pb2.ACCEPTANCE_MODE_BLOCK
    return common_pb2.SequenceParams(
        sampling=common_pb2.SamplingParams(seed=1), acceptance_mode=block, **fields
    )


@pytest.mark.parametrize(
    "bad_words",
    [[[]], [[1] * (limits.MAX_BAD_WORD_TOKENS + 1)], [[1]] * (2 * limits.MAX_BAD_WORDS + 1)],
    ids=["empty", "long", "many"],
)
def test_tokenised_bad_words_are_bounded(bad_words: list[list[int]]) -> None:
    words = [common_pb2.TokenSequence(token_ids=ids) for ids in bad_words]
    with refused("bad_words"):
        codec.sequence_params_from_proto(params_message(bad_words_token_ids=words))


@pytest.mark.parametrize("text", ["x", "00-0-0-01", f"00-{'1' * 32}-{'0' * 16}-01", "1" * 55])
def test_an_invalid_trace_context_is_refused(text: str) -> None:
    with refused("traceparent"):
        codec.sequence_params_from_proto(params_message(traceparent=text))


@pytest.mark.parametrize(
    ("sampling", "bad_words", "field"),
    [
        ({}, (), None),
        ({"allowed_token_ids": [1, 2]}, ((5, 1),), None),
        ({"allowed_token_ids": [1, 2]}, ((5, 1), (2,)), "allowed_token_ids"),
        ({"allowed_token_ids": [9], "min_tokens": 1}, (), "allowed_token_ids"),
        ({"allowed_token_ids": [9]}, (), None),
        ({"allowed_token_ids": [9], "min_tokens": 1, "ignore_eos": True}, (), None),
        ({"allowed_token_ids": [3], "min_tokens": 1, "stop_token_ids": [3]}, (), "allowed_token_ids"),
        ({}, tuple((token,) for token in range(9)), None),
        ({}, tuple((token,) for token in range(10)), "bad_words"),
        ({"min_tokens": 1}, tuple((token,) for token in range(9)), "bad_words"),
        ({"min_tokens": 1, "stop_token_ids": range(9)}, (), "min_tokens"),
    ],
)
def test_masks_must_leave_a_choice(
    sampling: dict[str, Any], bad_words: tuple[tuple[int, ...], ...], field: str | None
) -> None:
    params = SequenceParams(SamplingParams(**sampling), AcceptanceMode.COUPLED, 1, bad_words)
    if field is None:
        codec.check_choices_remain(params, 10, [9])
        return
    with refused(field):
        codec.check_choices_remain(params, 10, [9])


def test_log_probabilities_must_match_the_tokens() -> None:
    entries = [common_pb2.TokenLogprobs(token_id=token, rank=1) for token in (5, 6)]
    good = target_pb2.Verdict(num_accepted=1, token_ids=[5, 6], logprobs=entries)
    assert [entry.token_id for entry in codec.verdict_from_proto(good).logprobs] == [5, 6]
    for bad in (entries[:1], entries[::-1]):
        message = target_pb2.Verdict(num_accepted=1, token_ids=[5, 6], logprobs=bad)
        with pytest.raises(InvalidArgumentError, match=r"verdict\.logprobs"):
            codec.verdict_from_proto(message)
    uneven = common_pb2.TokenLogprobs(token_id=5, top_token_ids=[1], top_logprobs=[])
    with pytest.raises(InvalidArgumentError, match="as many ids"):
        codec.prompt_logprobs_from_proto(target_pb2.PromptLogprobs(logprobs=[uneven]))


def test_a_prompts_log_probabilities_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PROMPT_LOGPROBS", 30)
    call = codec.GenerateCall("", (1,) * 10, SamplingParams(prompt_logprobs=2), SpeculationParams())
    codec.check_against_model(call, 10, vocabulary_size=10, max_model_len=100)
    with refused("prompt_logprobs"):
        codec.check_against_model(call, 11, vocabulary_size=10, max_model_len=100)


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
def test_named_tokens_must_be_in_the_vocabulary(field: str) -> None:
    codec.check_named_tokens(SamplingParams(**{field: [0, 9]}), 10)
    with refused(field):
        codec.check_named_tokens(SamplingParams(**{field: [0, 10]}), 10)


def test_skip_special_tokens_is_sent_only_when_needed() -> None:
    """Receivers without the field serve all other requests; workers make no text."""
    shown = SamplingParams(skip_special_tokens=False, seed=1)
    message = sampling_to_proto(shown)
    assert message.HasField("skip_special_tokens")
    assert sampling_from_proto(message) == shown
    assert not sampling_to_proto(SamplingParams()).HasField("skip_special_tokens")
    params = SequenceParams(shown, AcceptanceMode.COUPLED, 1)
    assert not sequence_params_to_proto(params).sampling.HasField("skip_special_tokens")


def test_cached_tokens_round_trip() -> None:
    timings = Timings(rows=3, sequences=1, cached_tokens=64)
    assert timings_from_proto(timings_to_proto(timings)) == timings


# ---- conversations ---------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "é", "name": "ann"}, {"role": "assistant", "content": ""}]


@pytest.mark.parametrize("opens", [None, True, False])
def test_a_conversation_round_trips(opens: bool | None) -> None:
    call = ChatCall(MESSAGES, opens, True, {"a": [1, None]})
    assert chat_from_proto(chat_to_proto(call)) == call


def message(role: str = "user", content: str = "x") -> pb.ChatMessage:
    return pb.ChatMessage(role=role, content=content)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({}, "messages"),
        ({"messages": [message()] * (limits.MAX_MESSAGES + 1)}, "messages"),
        ({"messages": [message(), message("tool")]}, "messages[1].role"),
        ({"messages": [message("")]}, "messages[0].role"),
        ({"messages": [message()], "variables": "[]"}, "chat_template_kwargs"),
        ({"messages": [message()], "variables": "{"}, "chat_template_kwargs"),
        ({"messages": [message()], "variables": "[" * 9999}, "chat_template_kwargs"),
        (
            {"messages": [message()], "variables": json.dumps({"a": "x" * limits.MAX_STRUCTURE_CHARACTERS})},
            "chat_template_kwargs",
        ),
    ],
)
def test_an_unrenderable_conversation_is_named(values: dict[str, Any], field: str) -> None:
    with refused(field):
        chat_from_proto(pb.ApplyChatTemplateRequest(**values))


def test_unknown_fields_of_a_message_are_refused() -> None:
    odd = pb.ChatMessage.FromString(message().SerializeToString() + b"\x78\x01")
    with refused("messages[0]"):
        chat_from_proto(pb.ApplyChatTemplateRequest(messages=[odd]))
