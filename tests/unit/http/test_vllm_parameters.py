"""Parameters of vLLM's and TGI's clients, and the answers to them."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from harness.refusals import refused

from coordinator.api.http.openai.schema.bodies import CompletionRequest
from coordinator.api.http.server.body import parse
from coordinator.api.http.server.errors import HttpError, from_error
from coordinator.sequence.ledger import Commit
from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.core.types import FinishReason, StructuredOutputs, TokenLogprobs, TokenOrigin
from tests.unit.http.api import (
    CHATS,
    COMPLETIONS,
    LEAST,
    MESSAGES,
    Api,
    both_models,
    both_paths,
    commit,
    script,
)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def read(model: Any, least: dict[str, Any], **values: Any) -> Any:
    return parse(orjson.dumps(least | values), model)


async def prompt_tokens(api: Api, path: str) -> list[int]:
    tokens: list[int] = (await api.answer("/tokenize", **LEAST[path]))["tokens"]
    return tokens


@both_models
@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("guided_json", SCHEMA, "json"),
        ("guided_json", orjson.dumps(SCHEMA).decode(), "json"),
        ("guided_regex", "a+", "regex"),
        ("guided_choice", ["yes", "no"], "choice"),
        ("guided_grammar", 'start: "a"', "grammar"),
    ],
)
def test_guided_parameters_are_structured_outputs(
    model: Any, least: Any, name: str, value: Any, kind: str
) -> None:
    assert read(model, least, **{name: value}).sampling().structure == StructuredOutputs(**{kind: value})


@both_models
@pytest.mark.parametrize(
    "values",
    [
        {"guided_json": SCHEMA, "guided_regex": "a"},
        {"guided_choice": ["a"], "response_format": {"type": "json_object", "value": SCHEMA}},
    ],
    ids=", ".join,
)
def test_two_structures_are_refused_by_name(model: Any, least: Any, values: dict[str, Any]) -> None:
    first, second = values
    with refused(second) as caught:
        read(model, least, **values).sampling()
    assert caught.value.description == f"cannot be combined with {first}"


def test_a_bad_guided_value_is_named_as_given() -> None:
    wanted = read(CompletionRequest, LEAST[COMPLETIONS], guided_json="[]")
    with pytest.raises(InvalidArgumentError) as caught:
        wanted.sampling()
    assert from_error(caught.value, wanted.names).param == "guided_json"


@both_models
@pytest.mark.parametrize(
    ("name", "kind", "value"),
    [("json_object", "json", SCHEMA), ("json", "json", SCHEMA), ("regex", "regex", "a+")],
)
def test_tgi_formats_are_accepted(model: Any, least: Any, name: str, kind: str, value: Any) -> None:
    wanted = read(model, least, response_format={"type": name, "value": value})
    assert wanted.sampling().structure == StructuredOutputs(**{kind: value})
    told = from_error(InvalidArgumentError(f"structured_outputs.{kind}", "is wrong"), wanted.names)
    assert told.param == "response_format.value"


@pytest.mark.parametrize("name", ["tgi", "dummy"])
@both_paths
async def test_placeholder_models_mean_the_served_one(name: str, path: str, api: Api) -> None:
    assert (await api.answer(path, model=name))["model"] == "a/model"
    assert (await api.get(f"/v1/models/{name}")).status_code == 404


@pytest.mark.parametrize("value", ["four", "4", True, [1]])
def test_k_errors_name_the_allowed_values(value: Any) -> None:
    with pytest.raises(HttpError, match="integer from 0 to 32, or auto"):
        read(CompletionRequest, LEAST[COMPLETIONS], speculative_decoding={"num_speculative_tokens": value})


LONG = (2048, limits.MAX_TOKENS + 1, 2**62)


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        *((path, "max_tokens", value) for path in LEAST for value in LONG),
        *((CHATS, "max_completion_tokens", value) for value in LONG),
        *((CHATS, "min_tokens", value) for value in LONG),
        # Others are above the 16 tokens that a completion has by default.
        *((COMPLETIONS, "min_tokens", value) for value in LONG if value > limits.MAX_TOKENS),
    ],
)
async def test_lengths_above_any_bound_are_length_errors(path: str, name: str, value: int, api: Api) -> None:
    error = await api.refusal(path, **{"max_tokens": None} if name == "min_tokens" else {}, **{name: value})
    assert (error["code"], error["param"]) == ("context_length_exceeded", name)
    assert "maximum context length is 2048 tokens" in error["message"]


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.mark.parametrize(("name", "choice"), [("tools", "tool_choice"), ("functions", "function_call")])
async def test_uncalled_tools_are_accepted(name: str, choice: str, api: Api, coordinator: Any) -> None:
    await api.answer(CHATS)
    await api.answer(CHATS, **{name: TOOLS, choice: "none"})
    plain, with_tools = coordinator.calls
    assert with_tools.prompt == plain.prompt
    for called in ({}, {choice: "auto"}, {choice: None}):
        error = await api.refusal(CHATS, **{name: TOOLS}, **called)
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert f'{choice} "none"' in error["message"]
    assert (await api.refusal(CHATS, **{name: ["f"], choice: "none"}))["param"] == name


@both_paths
async def test_token_ids_are_returned_on_request(path: str, api: Api) -> None:
    assert "token_ids" not in (await api.choice(path))
    answer = await api.answer(path, return_token_ids=True, n=2)
    assert [choice["token_ids"] for choice in answer["choices"]] == [[5, 5]] * 2
    where = [answer] if path == CHATS else answer["choices"]
    assert [each["prompt_token_ids"] for each in where] == [await prompt_tokens(api, path)] * len(where)


@both_paths
async def test_streams_return_token_ids_with_their_events(path: str, coordinator: Any, api: Api) -> None:
    coordinator.script = script(
        Commit(0, (5, 6), (TokenOrigin.TARGET,) * 2, ""), commit(2, "text", FinishReason.LENGTH)
    )
    events = await api.stream(path, return_token_ids=True)
    told = [choice.get("token_ids") for event in events for choice in event["choices"]]
    assert [ids for ids in told if ids is not None] == [[5, 6], [5]]
    first, *rest = events if path == CHATS else [event["choices"][0] for event in events]
    assert first["prompt_token_ids"] == await prompt_tokens(api, path)
    assert not any("prompt_token_ids" in each for each in rest)


@pytest.mark.parametrize("prompt", ["def main():", [5] * 4])
async def test_returned_prompts_are_bounded(prompt: Any, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PROMPT_LOGPROBS", 11)
    assert (await api.refusal(prompt=prompt, n=3, return_token_ids=True))["param"] == "return_token_ids"


@both_paths
async def test_each_choice_has_speculation_statistics(path: str, api: Api) -> None:
    asked = {"include_speculative_decoding": True, "n": 2}
    for choice in (await api.answer(path, **asked))["choices"]:
        assert choice["speculative_decoding_stats"] == {
            "mean_acceptance_length": 1.0,
            "draft_acceptance_rate": 0.0,
            "acceptance_histogram": {},
            "num_spec_steps": 0,
            "num_accepted_draft_tokens": 0,
            "num_draft_tokens": 0,
            "num_spec_tokens": 4,
        }
    choices = [choice for event in await api.stream(path, **asked) for choice in event["choices"]]
    ended = [choice["finish_reason"] is not None for choice in choices]
    assert ["speculative_decoding_stats" in choice for choice in choices] == ended
    assert sum(ended) == 2


@both_paths
async def test_every_object_has_a_fingerprint(path: str, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    # It reads a file, which no request may wait for.
    monkeypatch.setattr("coordinator.api.http.openai.schema.parameters.version", None)
    mark = (await api.answer(path))["system_fingerprint"]
    assert mark.startswith("fp_")
    assert {event["system_fingerprint"] for event in await api.stream(path)} == {mark}


async def test_echo_without_tokens_scores_the_prompt(coordinator: Any, api: Api) -> None:
    report = tuple(TokenLogprobs(token, -0.5, 1) for token in (614, 266, 657))
    coordinator.script = script(
        Commit(0, (), (), "def main():"),
        Commit(0, (), (), "", prompt_logprobs=report),
        commit(0, " no", logprobs=(TokenLogprobs(5, -1.0, 1),)),  # the token that has to follow
    )
    asked = {"max_tokens": 0, "echo": True, "logprobs": 0, "return_token_ids": True}
    answer = await api.answer(**asked)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("def main():", "length", [])
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert (answer["usage"]["completion_tokens"], answer["usage"]["total_tokens"]) == (0, 4)
    assert coordinator.calls[0].sampling.max_tokens == 1
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await api.stream(**asked, stream_options=options)
    told = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["text"] for choice in told) == "def main():"
    logprobs = [value for choice in told for value in choice["logprobs"]["token_logprobs"]]
    assert logprobs == [None, -0.5, -0.5, -0.5]
    assert told[-1]["finish_reason"] == "length"
    assert {event["usage"]["completion_tokens"] for event in events} == {0}


@pytest.mark.parametrize(
    ("path", "values", "param"),
    [
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        (COMPLETIONS, {"max_tokens": -1, "echo": True}, "max_tokens"),
        (CHATS, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (COMPLETIONS, {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        (COMPLETIONS, {"truncation_side": "left"}, "truncation_side"),
        (CHATS, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (COMPLETIONS, {"priority": 1}, "priority"),
        (CHATS, {"priority": -1}, "priority"),
    ],
)
async def test_refused_vllm_parameters_are_named(path: str, values: Any, param: str, api: Api) -> None:
    assert (await api.refusal(path, **values))["param"] == param


@both_paths
@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, slice(-2, None)),
        ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, slice(-2, None)),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, slice(2)),
        ({"truncate_prompt_tokens": 1000}, slice(None)),
        ({"truncate_prompt_tokens": -1, "max_tokens": 2046}, slice(-2, None)),
    ],
)
async def test_a_prompt_is_truncated_to_its_last_tokens(
    path: str, values: dict[str, Any], kept: slice, coordinator: Any, api: Api
) -> None:
    await api.answer(path, **values)
    assert coordinator.calls[0].prompt == tuple((await prompt_tokens(api, path))[kept])


async def test_each_of_several_prompts_is_truncated(coordinator: Any, api: Api) -> None:
    await api.answer(prompt=[[1, 2, 3], [4]], truncate_prompt_tokens=2)
    assert [call.prompt for call in coordinator.calls] == [(2, 3), (4,)]


@pytest.mark.parametrize("report", [{"return_token_ids": True}, {"prompt_logprobs": 1}])
async def test_a_prompt_is_truncated_before_its_report_is_bounded(
    report: dict[str, Any], coordinator: Any, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_PROMPT_LOGPROBS", 4)
    whole = {"prompt": [5] * 9, **report}
    assert (await api.refusal(**whole))["param"] in report
    await api.answer(**whole, truncate_prompt_tokens=2)
    assert [call.prompt for call in coordinator.calls] == [(5, 5)]


async def test_special_tokens_of_a_prompt_may_be_left_out(
    coordinator: Any, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    async def tokenize(text: str, *, add_special_tokens: bool = True) -> list[int]:
        asked.append(add_special_tokens)
        return [1]

    monkeypatch.setattr(coordinator, "tokenize", tokenize)
    await api.answer(add_special_tokens=False)
    assert asked == [False]


@both_paths
async def test_special_tokens_are_shown_on_request(path: str, coordinator: Any, api: Api) -> None:
    await api.answer(path)
    await api.answer(path, skip_special_tokens=False)
    assert [call.sampling.skip_special_tokens for call in coordinator.calls] == [True, False]


async def test_tokens_may_be_named_by_ids(coordinator: Any, api: Api) -> None:
    logprobs = (TokenLogprobs(5, -0.5, 1, (5,), (-0.5,)),)
    coordinator.script = script(commit(0, "x", FinishReason.LENGTH, logprobs=logprobs))
    told = (await api.choice(logprobs=1, return_tokens_as_token_ids=True))["logprobs"]
    assert (told["tokens"], told["top_logprobs"]) == (["token_id:5"], [{"token_id:5": -0.5}])
    values = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    assert (await api.choice(CHATS, **values))["logprobs"]["content"][0]["token"] == "token_id:5"


async def test_the_last_message_may_be_continued(api: Api, coordinator: Any) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "return "}]
    expected = await coordinator.tokenize("[def main():][return ", add_special_tokens=False)
    asked = {"messages": messages, "continue_final_message": True}
    for more in ({}, {"add_generation_prompt": False}):
        await api.answer(CHATS, **asked, **more)
        assert coordinator.calls[-1].prompt == tuple(expected)
        assert (await api.answer("/tokenize", **asked, **more))["tokens"] == expected
    error = await api.refusal(CHATS, **asked, add_generation_prompt=True)
    assert error["param"] == "continue_final_message"


async def test_token_strings_are_the_vocabularys(api: Api, vocabulary: Any) -> None:
    answer = await api.answer("/tokenize", prompt="a b", return_token_strs=True)
    assert answer["token_strs"] == [vocabulary.tokenizer.id_to_token(each) for each in answer["tokens"]]
