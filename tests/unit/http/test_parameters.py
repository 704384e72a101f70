"""Parameters are honoured or refused by name; `null` is the default."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_args

import orjson
import pytest
from harness.refusals import refused as field_refused

from coordinator.api.http.openai.completions import calls_of
from coordinator.api.http.openai.schema.bodies import ChatRequest, CompletionRequest
from coordinator.api.http.server.body import parse
from coordinator.api.http.server.errors import HttpError, from_error
from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.core.types import SamplingParams, SpeculationParams
from tests.unit.http.api import CHATS, COMPLETIONS, LEAST, both_models

COMPLETION, CHAT = LEAST[COMPLETIONS], LEAST[CHATS]
K = "speculative_decoding.num_speculative_tokens"


def read(model: Any, values: Any) -> Any:
    return parse(orjson.dumps(values), model)


def refused(model: Any, values: Any) -> HttpError:
    with pytest.raises(HttpError) as caught:
        read(model, values)
    assert caught.value.status == 400
    return caught.value


@both_models
def test_omitted_parameters_have_the_cores_defaults(model: Any, least: dict[str, Any]) -> None:
    wanted = read(model, least)
    assert wanted.sampling() == SamplingParams()
    assert wanted.speculation() == SpeculationParams()
    assert not wanted.include_usage
    assert not wanted.tells_usage_so_far


@both_models
def test_null_is_the_default(model: Any, least: dict[str, Any]) -> None:
    nulls = {name: None for name in (*model.model_fields, *model.UNSUPPORTED) if name not in least}
    assert read(model, least | nulls) == read(model, least)


@both_models
def test_every_sampling_parameter_can_be_given(model: Any, least: dict[str, Any]) -> None:
    missing = {f.name for f in fields(SamplingParams)} - set(model.model_fields)
    assert missing == ({"echo"} if model is ChatRequest else set())


@both_models
def test_parameters_reach_the_core(model: Any, least: dict[str, Any]) -> None:
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 7, "n": 2}
    given |= {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3}
    given |= {"max_tokens": 9, "min_tokens": 2, "stop": ["a", "b"], "stop_token_ids": [3], "ignore_eos": True}
    given |= {"include_stop_str_in_output": True, "bad_words": ["c"], "allowed_token_ids": [1, 2]}
    given |= {"prompt_logprobs": 1}
    wanted = read(model, {**least, **given, "logit_bias": {"12": 5, "3": -0.5}})
    assert wanted.sampling() == SamplingParams(**given, logit_bias={12: 5.0, 3: -0.5})


@pytest.mark.parametrize(("k", "width"), [(0, 1), (3, 4), ("auto", "auto")])
def test_speculation_reaches_the_core(k: Any, width: Any) -> None:
    given = {"num_speculative_tokens": k, "acceptance": "block"}
    given |= {"tree_width": width, "max_tree_nodes": 9, "drafts_per_sequence": 2}
    wanted = read(CompletionRequest, {**COMPLETION, "speculative_decoding": given})
    assert wanted.speculation() == SpeculationParams(**given)


@both_models
def test_an_unknown_parameter_is_refused_even_if_null(model: Any, least: dict[str, Any]) -> None:
    error = refused(model, {**least, "temprature": None})
    assert (error.param, error.code) == ("temprature", "unknown_parameter")


@both_models
def test_unsupported_parameters_accept_harmless_values_only(model: Any, least: Any) -> None:
    for name, parameter in model.UNSUPPORTED.items():
        for value in parameter.harmless:
            assert read(model, {**least, name: value}) == read(model, least)
        error = refused(model, {**least, name: {"some": "thing"}})
        assert (error.param, error.code) == (name, "unsupported_parameter")
        assert error.message == f"{name}: {parameter.why}"


@both_models
def test_continuous_usage_implies_final_usage(model: Any, least: Any) -> None:
    for at_the_end in ({"include_usage": True}, {"include_usage": False}, {"include_usage": None}, {}):
        for on_the_way in (True, False, None):
            options = {**at_the_end, "continuous_usage_stats": on_the_way}
            wanted = read(model, {**least, "stream": True, "stream_options": options})
            assert wanted.include_usage == bool(at_the_end.get("include_usage") or on_the_way)
            assert wanted.tells_usage_so_far == bool(on_the_way)


@both_models
@pytest.mark.parametrize(
    ("name", "given", "read_as"),
    [
        ("stop", "end", ("end",)),
        *(("temperature", tiny, limits.MIN_TEMPERATURE) for tiny in (1e-8, 5e-324, 0.99e-4)),
        *(("temperature", kept, kept) for kept in (0, -0.0, limits.MIN_TEMPERATURE, 1, 100.0)),
    ],
)
def test_a_tiny_temperature_and_one_stop_string_are_taken(
    model: Any, least: Any, name: str, given: Any, read_as: Any
) -> None:
    assert getattr(read(model, least | {name: given}).sampling(), name) == read_as


@pytest.mark.parametrize("given", [-1e-8, -1, 100.1])
def test_temperatures_out_of_range_are_refused(given: float) -> None:
    with field_refused("temperature"):
        read(CompletionRequest, COMPLETION | {"temperature": given}).sampling()


@pytest.mark.parametrize(("name", "value"), [("store", 0), ("store", True), ("parallel_tool_calls", 1)])
def test_a_value_of_another_type_is_not_harmless(name: str, value: Any) -> None:
    assert refused(ChatRequest, {**CHAT, name: value}).param == name


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"prompt": 3}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [[1], ["a"]]}, "prompt[1][0]"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [{}]}, "prompt"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 1e30}, "max_tokens"),
        ({"stop": 3}, "stop"),
        ({"stop": ["a", None]}, "stop[1]"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"speculative_decoding": {"k": 1}}, "speculative_decoding.k"),
        ({"speculative_decoding": {"num_speculative_tokens": "many"}}, K),
        ({"speculative_decoding": {"num_speculative_tokens": True}}, K),
        ({"speculative_decoding": {"tree_width": "wide"}}, "speculative_decoding.tree_width"),
        ({"speculative_decoding": {"max_tree_nodes": "auto"}}, "speculative_decoding.max_tree_nodes"),
        ({"speculative_decoding": {"drafts_per_sequence": 2.5}}, "speculative_decoding.drafts_per_sequence"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"1": "a"}}, "logit_bias.1"),
        ({"user": "x" * 600}, "user"),
    ],
)
def test_a_wrong_type_names_the_field(values: dict[str, Any], param: str) -> None:
    error = refused(CompletionRequest, COMPLETION | values)
    assert error.param == param
    assert error.message.startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ("hello", "messages"),
        ([], "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [3]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": "x", "weight": 1}], "messages[0].weight"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "content": "x", "annotations": [{}]}], "messages[0].annotations"),
        ([{"role": "assistant", "content": "x", "reasoning": "y"}], "messages[0].reasoning"),
        ([{"role": "user", "content": "x", "type": "image"}], "messages[0].type"),
    ],
)
def test_a_wrong_message_is_named(messages: Any, param: str) -> None:
    assert refused(ChatRequest, {"messages": messages}).param == param


def test_an_answer_can_be_sent_back_unchanged() -> None:
    members = ("refusal", "annotations", "audio", "function_call", "tool_calls")
    of_vllm = ("reasoning", "reasoning_content", "tool_call_id")
    of_clients = ("parsed", "provider_specific_fields", "type")
    message = {"role": "assistant", "content": "x"} | dict.fromkeys(members + of_vllm + of_clients)
    for changes in (
        {},
        {"annotations": [], "tool_calls": []},
        {"parsed": {"a": [1]}, "provider_specific_fields": {"refusal": None}, "type": "text"},
    ):
        (read_back,) = read(ChatRequest, {"messages": [message | changes]}).messages
        assert read_back.shown == {"role": "assistant", "content": "x"}


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": "x"}])
@pytest.mark.parametrize(
    ("member", "calls"), [("tool_calls", [{"id": "1", "type": "function"}]), ("function_call", {"name": "f"})]
)
def test_a_history_with_tool_calls_is_refused(content: Any, member: str, calls: Any) -> None:
    """Such a message has no content."""
    messages = [*CHAT["messages"], {"role": "assistant", **content, member: calls}]
    error = refused(ChatRequest, {"messages": messages})
    assert (error.param, error.code) == (f"messages[1].{member}", "unsupported_parameter")


@pytest.mark.parametrize("bias", [{"a": 1}, {"-1": 1}, {"1.0": 1}, {"": 1}, {"²": 1}, {"1": 1, "01": 1}])
def test_logit_bias_keys_must_be_token_ids(bias: dict[str, int]) -> None:
    wanted = read(CompletionRequest, {**COMPLETION, "logit_bias": bias})
    with field_refused("logit_bias"):
        wanted.sampling()


@pytest.mark.parametrize(
    ("values", "limit", "name"),
    [
        ({}, None, "max_tokens"),
        ({"max_tokens": 3}, 3, "max_tokens"),
        ({"max_completion_tokens": 3}, 3, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 3}, 3, "max_completion_tokens"),
    ],
)
def test_both_names_of_the_token_limit_work(values: dict[str, int], limit: int | None, name: str) -> None:
    wanted = read(ChatRequest, CHAT | values)
    assert wanted.token_limit == limit
    told = from_error(InvalidArgumentError("max_tokens", "is wrong"), wanted.names)
    assert (told.param, told.message) == (name, f"{name}: is wrong")


def test_two_different_limits_are_refused() -> None:
    wanted = read(ChatRequest, {**CHAT, "max_tokens": 3, "max_completion_tokens": 4})
    with pytest.raises(InvalidArgumentError) as caught:
        _ = wanted.token_limit
    told = from_error(caught.value, wanted.names)
    assert told.param == "max_completion_tokens"
    assert told.message == "max_completion_tokens: is 4, but max_tokens is 3"


def test_common_parameters_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For 256 prompts and 32,768 allowed tokens it takes seconds."""
    checked: list[SamplingParams] = []
    check = SamplingParams.__post_init__

    def noting(made: SamplingParams) -> None:
        check(made)
        if made.allowed_token_ids:
            checked.append(made)

    monkeypatch.setattr(SamplingParams, "__post_init__", noting)

    def calls(*prompts: str) -> Any:
        values = {"prompt": prompts, "allowed_token_ids": [1, 2], "seed": 3, "cache_salt": "mine", "n": 2}
        values["speculative_decoding"] = {"num_speculative_tokens": 5}
        return calls_of(read(CompletionRequest, values), "id")

    (alone,) = calls("a")
    times = len(checked)
    for index, call in enumerate(calls(*"abcdefgh")):
        expected = replace(alone, request_id=f"id-{index}", prompt="abcdefgh"[index])
        assert call == expected
    assert len(checked) == 2 * times


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"top_logprobs": 0}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 4}, 4),
    ],
)
def test_a_chats_logprobs_setting_is_read(values: dict[str, Any], reported: int | None) -> None:
    assert read(ChatRequest, CHAT | values).num_logprobs == reported


@pytest.mark.parametrize("number", [2, -1])
def test_top_logprobs_alone_is_refused(number: int) -> None:
    with field_refused("top_logprobs"):
        _ = read(ChatRequest, {**CHAT, "top_logprobs": number}).num_logprobs


BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        *((raw, "invalid_json") for raw in (b"", b"{", b"\xff", BOM * 2 + b"{}", b"[" * 9999)),
        *((raw, "invalid_json") for raw in (b'{"prompt": "\\ud800"}', b'{"prompt": NaN}')),
        *((raw, "invalid_type") for raw in (b"[]", b"3", b"null", b'"prompt"')),
    ],
)
def test_bodies_other_than_a_json_object_are_refused(raw: bytes, code: str) -> None:
    with pytest.raises(HttpError) as caught:
        parse(raw, CompletionRequest)
    assert (caught.value.status, caught.value.code) == (400, code)


def test_a_byte_order_mark_before_json_is_ignored() -> None:
    raw = orjson.dumps(COMPLETION)
    assert parse(BOM + raw, CompletionRequest) == parse(raw, CompletionRequest)


@pytest.mark.parametrize(
    ("name", "value"),
    [("prompt", {"x": "secret"}), ("stop", [["secret"]]), ("temperature", "secret"), ("model", ["secret"])],
)
def test_errors_do_not_repeat_the_request(name: str, value: Any) -> None:
    """Except names of parameters."""
    assert "secret" not in refused(CompletionRequest, COMPLETION | {name: value}).message


@both_models
def test_only_the_prompt_is_required(model: Any, least: dict[str, Any]) -> None:
    required = {name for name, info in model.model_fields.items() if info.is_required()}
    assert required == set(least)
    for name, info in model.model_fields.items():
        assert name in least or type(None) in get_args(info.annotation)
