"""Parameters of vLLM's and TGI's clients, and the answers to them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import orjson
import pytest

from coordinator.api.chat_template import ChatTemplate
from coordinator.api.http.openai.schema.bodies import ChatRequest, CompletionRequest
from coordinator.api.http.server.body import parse
from coordinator.api.http.server.errors import HttpError, from_error
from coordinator.sequence.ledger import Commit
from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.core.types import FinishReason, StructuredOutputs, TokenLogprobs, TokenOrigin
from paceline.rpc.codec import GenerateCall

TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
MESSAGES = [{"role": "user", "content": "def main():"}]
LEAST: dict[Any, dict[str, Any]] = {CompletionRequest: {"prompt": "x"}, ChatRequest: {"messages": MESSAGES}}
PATHS = {"/v1/completions": {"prompt": "def main():"}, "/v1/chat/completions": {"messages": MESSAGES}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
Make = Callable[..., httpx2.AsyncClient]


def read(model: Any, **values: Any) -> Any:
    return parse(orjson.dumps(LEAST[model] | values), model)


async def post(client: httpx2.AsyncClient, path: str, **values: Any) -> Any:
    answer = await client.post(path, json=PATHS[path] | values)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refused(client: httpx2.AsyncClient, path: str, **values: Any) -> Any:
    answer = await client.post(path, json=PATHS[path] | values)
    assert answer.status_code in (400, 404), answer.text
    return answer.json()["error"]


async def streamed(client: httpx2.AsyncClient, path: str, **values: Any) -> list[Any]:
    answer = await client.post(path, json=PATHS[path] | values | {"stream": True})
    assert answer.status_code == 200, answer.text
    *blocks, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [orjson.loads(block.removeprefix("data: ")) for block in blocks]


@pytest.fixture
async def chats(coordinator: Any, make_client: Make) -> AsyncIterator[httpx2.AsyncClient]:
    async with make_client(coordinator, ChatTemplate(TEMPLATE)) as client:
        yield client


@pytest.mark.parametrize("model", [CompletionRequest, ChatRequest])
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
def test_guided_parameters_are_structured_outputs(model: Any, name: str, value: Any, kind: str) -> None:
    assert read(model, **{name: value}).sampling().structure == StructuredOutputs(**{kind: value})


@pytest.mark.parametrize("model", [CompletionRequest, ChatRequest])
def test_two_structures_are_refused_by_name(model: Any) -> None:
    both = {"guided_json": SCHEMA, "guided_regex": "a"}, {"guided_choice": ["a"], "response_format": TGI[0]}
    for values in both:
        with pytest.raises(InvalidArgumentError) as caught:
            read(model, **values).sampling()
        first, second = values
        assert (caught.value.field, caught.value.description) == (second, f"cannot be combined with {first}")


def test_a_bad_guided_value_is_named_as_given() -> None:
    wanted = read(CompletionRequest, guided_json="[]")
    with pytest.raises(InvalidArgumentError) as caught:
        wanted.sampling()
    assert from_error(caught.value, wanted.names).param == "guided_json"


TGI: list[dict[str, Any]] = [
    {"type": "json_object", "value": SCHEMA},
    {"type": "json", "value": SCHEMA},
    {"type": "regex", "value": "a+"},
]


@pytest.mark.parametrize("model", [CompletionRequest, ChatRequest])
@pytest.mark.parametrize("form", TGI)
def test_tgi_formats_are_accepted(model: Any, form: dict[str, Any]) -> None:
    kind = "regex" if form["type"] == "regex" else "json"
    wanted = read(model, response_format=form)
    assert wanted.sampling().structure == StructuredOutputs(**{kind: form["value"]})
    told = from_error(InvalidArgumentError(f"structured_outputs.{kind}", "is wrong"), wanted.names)
    assert told.param == "response_format.value"


@pytest.mark.parametrize("name", ["tgi", "dummy"])
@pytest.mark.parametrize("path", PATHS)
async def test_placeholder_models_mean_the_served_one(
    name: str, path: str, chats: httpx2.AsyncClient
) -> None:
    assert (await post(chats, path, model=name))["model"] == "a/model"
    assert (await chats.get(f"/v1/models/{name}")).status_code == 404


@pytest.mark.parametrize("path", PATHS)
async def test_an_unknown_model_error_names_the_served_one(path: str, chats: httpx2.AsyncClient) -> None:
    error = await refused(chats, path, model="gpt-4")
    assert error["code"] == "model_not_found"
    assert "a/model" in error["message"]


def test_k_errors_name_the_allowed_values() -> None:
    for value in ("four", "4", True, [1]):
        with pytest.raises(HttpError) as caught:
            read(CompletionRequest, speculative_decoding={"num_speculative_tokens": value})
        assert "integer from 0 to 32, or auto" in caught.value.message


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "max_completion_tokens"])
async def test_lengths_above_any_bound_are_length_errors(
    path: str, name: str, chats: httpx2.AsyncClient
) -> None:
    if name == "max_completion_tokens" and "chat" not in path:
        pytest.skip("a chat's parameter")
    for value in (2048, limits.MAX_TOKENS + 1, 2**62):
        given = {name: value} if name != "min_tokens" else {name: value, "max_tokens": None}
        if name == "min_tokens" and "chat" not in path and value <= limits.MAX_TOKENS:
            continue  # above the 16 tokens that a completion has by default
        error = await refused(chats, path, **given)
        assert (error["code"], error["param"]) == ("context_length_exceeded", name), error
        assert "maximum context length is 2048 tokens" in error["message"]


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.mark.parametrize(("name", "choice"), [("tools", "tool_choice"), ("functions", "function_call")])
async def test_uncalled_tools_are_accepted(
    name: str, choice: str, chats: httpx2.AsyncClient, coordinator: Any
) -> None:
    path = "/v1/chat/completions"
    await post(chats, path)
    await post(chats, path, **{name: TOOLS, choice: "none"})
    plain, with_tools = coordinator.calls
    assert with_tools.prompt == plain.prompt
    for values in ({name: TOOLS}, {name: TOOLS, choice: "auto"}, {name: TOOLS, choice: None}):
        error = await refused(chats, path, **values)
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert f'{choice} "none"' in error["message"]
    assert (await refused(chats, path, **{name: ["f"], choice: "none"}))["param"] == name


@pytest.mark.parametrize("path", PATHS)
async def test_token_ids_are_returned_on_request(path: str, chats: httpx2.AsyncClient) -> None:
    plain = await post(chats, path)
    assert "token_ids" not in plain["choices"][0]
    answer = await post(chats, path, return_token_ids=True, n=2)
    assert [choice["token_ids"] for choice in answer["choices"]] == [[5, 5]] * 2
    prompt = (await chats.post("/tokenize", json=PATHS[path])).json()["tokens"]
    where = [answer] if "chat" in path else answer["choices"]
    assert [each["prompt_token_ids"] for each in where] == [prompt] * len(where)


@pytest.mark.parametrize("path", PATHS)
async def test_streams_return_token_ids_with_their_events(
    path: str, coordinator: Any, commit: Any, chats: httpx2.AsyncClient
) -> None:
    async def script(_: GenerateCall) -> AsyncIterator[Commit]:
        yield Commit(0, (5, 6), (TokenOrigin.TARGET,) * 2, "")
        yield commit(2, "text", finish=FinishReason.LENGTH)

    coordinator.script = script
    events = await streamed(chats, path, return_token_ids=True)
    told = [choice.get("token_ids") for event in events for choice in event["choices"]]
    assert [ids for ids in told if ids is not None] == [[5, 6], [5]]
    prompt = (await chats.post("/tokenize", json=PATHS[path])).json()["tokens"]
    first, *rest = events if "chat" in path else [event["choices"][0] for event in events]
    assert first["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in each for each in rest)


async def test_returned_prompts_are_bounded(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_PROMPT_LOGPROBS", 11)
    for prompt in ("def main():", [5] * 4):
        error = await refused(client, "/v1/completions", prompt=prompt, n=3, return_token_ids=True)
        assert error["param"] == "return_token_ids"


@pytest.mark.parametrize("path", PATHS)
async def test_each_choice_has_speculation_statistics(
    path: str, coordinator: Any, chats: httpx2.AsyncClient
) -> None:
    asked = {"include_speculative_decoding": True, "n": 2}
    answer = await post(chats, path, **asked)
    for choice in answer["choices"]:
        assert choice["speculative_decoding_stats"] == {
            "mean_acceptance_length": 1.0,
            "draft_acceptance_rate": 0.0,
            "acceptance_histogram": {},
            "num_spec_steps": 0,
            "num_accepted_draft_tokens": 0,
            "num_draft_tokens": 0,
            "num_spec_tokens": 4,
        }
    events = await streamed(chats, path, **asked)
    choices = [choice for event in events for choice in event["choices"]]
    ended = [choice["finish_reason"] is not None for choice in choices]
    assert ["speculative_decoding_stats" in choice for choice in choices] == ended
    assert sum(ended) == 2


@pytest.mark.parametrize("path", PATHS)
async def test_every_object_has_a_fingerprint(
    path: str, chats: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It reads a file, which no request may wait for.
    monkeypatch.setattr("coordinator.api.http.openai.schema.parameters.version", None)
    mark = (await post(chats, path))["system_fingerprint"]
    assert mark.startswith("fp_")
    assert {event["system_fingerprint"] for event in await streamed(chats, path)} == {mark}


def entries(call: GenerateCall) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(token, -0.5, 1) for token in (614, 266, 657))


async def scoring(call: GenerateCall) -> AsyncIterator[Commit]:
    """A prompt's echo and report, then the token that has to follow."""
    for choice in range(call.sampling.n):
        yield Commit(0, (), (), "def main():", choice=choice)
        yield Commit(0, (), (), "", choice=choice, prompt_logprobs=entries(call))
        yield Commit(
            0, (5,), (TokenOrigin.TARGET,), " no", choice=choice, logprobs=(TokenLogprobs(5, -1.0, 1),)
        )


async def test_echo_without_tokens_scores_the_prompt(coordinator: Any, client: httpx2.AsyncClient) -> None:
    coordinator.script = scoring
    asked = {"max_tokens": 0, "echo": True, "logprobs": 0, "return_token_ids": True}
    answer = await post(client, "/v1/completions", **asked)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("def main():", "length", [])
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert (answer["usage"]["completion_tokens"], answer["usage"]["total_tokens"]) == (0, 4)
    assert coordinator.calls[0].sampling.max_tokens == 1
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = await streamed(client, "/v1/completions", **asked, stream_options=options)
    told = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["text"] for choice in told) == "def main():"
    logprobs = [value for choice in told for value in choice["logprobs"]["token_logprobs"]]
    assert logprobs == [None, -0.5, -0.5, -0.5]
    assert told[-1]["finish_reason"] == "length"
    assert {event["usage"]["completion_tokens"] for event in [*events, last]} == {0}


@pytest.mark.parametrize(
    ("path", "values", "param"),
    [
        ("/v1/completions", {"max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        ("/v1/completions", {"max_tokens": -1, "echo": True}, "max_tokens"),
        ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/completions", {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ("/v1/completions", {"truncation_side": "left"}, "truncation_side"),
        ("/v1/chat/completions", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/completions", {"priority": 1}, "priority"),
        ("/v1/chat/completions", {"priority": -1}, "priority"),
    ],
)
async def test_refused_vllm_parameters_are_named(
    path: str, values: dict[str, Any], param: str, chats: httpx2.AsyncClient
) -> None:
    assert (await refused(chats, path, **values))["param"] == param


@pytest.mark.parametrize("path", PATHS)
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
    path: str, values: dict[str, Any], kept: slice, coordinator: Any, chats: httpx2.AsyncClient
) -> None:
    whole = (await chats.post("/tokenize", json=PATHS[path])).json()["tokens"]
    await post(chats, path, **values)
    assert coordinator.calls[0].prompt == tuple(whole[kept])


async def test_each_of_several_prompts_is_truncated(coordinator: Any, client: httpx2.AsyncClient) -> None:
    await post(client, "/v1/completions", prompt=[[1, 2, 3], [4]], truncate_prompt_tokens=2)
    assert [call.prompt for call in coordinator.calls] == [(2, 3), (4,)]


@pytest.mark.parametrize("report", [{"return_token_ids": True}, {"prompt_logprobs": 1}])
async def test_a_prompt_is_truncated_before_its_report_is_bounded(
    report: dict[str, Any], coordinator: Any, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_PROMPT_LOGPROBS", 4)
    whole = {"prompt": [5] * 9, **report}
    assert (await refused(client, "/v1/completions", **whole))["param"] in report
    await post(client, "/v1/completions", **whole, truncate_prompt_tokens=2)
    assert [call.prompt for call in coordinator.calls] == [(5, 5)]


async def test_special_tokens_of_a_prompt_may_be_left_out(
    coordinator: Any, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    async def tokenize(text: str, *, add_special_tokens: bool = True) -> list[int]:
        asked.append(add_special_tokens)
        return [1]

    monkeypatch.setattr(coordinator, "tokenize", tokenize)
    await post(client, "/v1/completions", add_special_tokens=False)
    assert asked == [False]


@pytest.mark.parametrize("path", PATHS)
async def test_special_tokens_are_shown_on_request(
    path: str, coordinator: Any, chats: httpx2.AsyncClient
) -> None:
    await post(chats, path)
    await post(chats, path, skip_special_tokens=False)
    assert [call.sampling.skip_special_tokens for call in coordinator.calls] == [True, False]


@pytest.mark.parametrize("path", PATHS)
async def test_tokens_may_be_named_by_ids(
    path: str, coordinator: Any, commit: Any, chats: httpx2.AsyncClient
) -> None:
    async def script(_: GenerateCall) -> AsyncIterator[Commit]:
        logprobs = (TokenLogprobs(5, -0.5, 1, (5,), (-0.5,)),)
        yield commit(0, "x", finish=FinishReason.LENGTH, logprobs=logprobs)

    coordinator.script = script
    values = {"logprobs": True, "top_logprobs": 1} if "chat" in path else {"logprobs": 1}
    (choice,) = (await post(chats, path, **values, return_tokens_as_token_ids=True))["choices"]
    if "chat" in path:
        assert choice["logprobs"]["content"][0]["token"] == "token_id:5"
    else:
        assert choice["logprobs"]["tokens"] == ["token_id:5"]
        assert choice["logprobs"]["top_logprobs"] == [{"token_id:5": -0.5}]


async def test_the_last_message_may_be_continued(chats: httpx2.AsyncClient, coordinator: Any) -> None:
    path, messages = "/v1/chat/completions", [*MESSAGES, {"role": "assistant", "content": "return "}]
    expected = tuple(await coordinator.tokenize("[def main():][return ", add_special_tokens=False))
    for more in ({}, {"add_generation_prompt": False}):
        await post(chats, path, messages=messages, continue_final_message=True, **more)
        assert coordinator.calls[-1].prompt == expected
        asked = {"messages": messages, "continue_final_message": True, **more}
        assert (await chats.post("/tokenize", json=asked)).json()["tokens"] == list(expected)
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert (await refused(chats, path, messages=messages, **both))["param"] == "continue_final_message"


async def test_token_strings_are_the_vocabularys(client: httpx2.AsyncClient, vocabulary: Any) -> None:
    answer = (await client.post("/tokenize", json={"prompt": "a b", "return_token_strs": True})).json()
    assert answer["token_strs"] == [vocabulary.tokenizer.id_to_token(each) for each in answer["tokens"]]
