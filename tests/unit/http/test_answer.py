"""Answers, whole and streamed; clients that leave and requests that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import orjson
import pytest

from coordinator.api.chat_template import ChatTemplate
from coordinator.api.http.app import make_app
from coordinator.api.http.openai.answer import Answer
from coordinator.api.http.openai.logprobs import LogprobWriter
from coordinator.api.http.server.errors import HttpError
from coordinator.sequence.ledger import Commit, Finish
from paceline.core.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError
from paceline.core.types import FinishReason, SamplingParams, SpeculationParams, TokenLogprobs
from paceline.rpc.codec import GenerateCall

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
HANG = 30.0
TOKENS = tuple(TokenLogprobs(token, -0.5, 1, (token, 7), (-0.5, float("-inf"))) for token in (523, 614))


def events_of(body: bytes) -> list[Any]:
    """The events of a stream; the last one is None for [DONE]."""
    blocks = body.decode().split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    return [None if block == "data: [DONE]" else orjson.loads(block[6:]) for block in blocks]


async def stream(client: httpx2.AsyncClient, path: str, values: dict[str, Any]) -> list[Any]:
    answer = await client.post(path, json={**values, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events_of(answer.content)


def usage_of(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


async def test_a_completion_has_choices_and_usage(client: httpx2.AsyncClient, coordinator: Any) -> None:
    answer = await client.post("/v1/completions", json={"prompt": "def main():", "model": "a/model"})
    content = answer.json()
    assert answer.headers["x-request-id"] == content["id"]
    assert content["object"] == "text_completion"
    assert content["choices"] == [
        {"index": 0, "text": "hello0 world", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert content["usage"] == usage_of(4, 2)
    (call,) = coordinator.calls
    assert call.prompt == "def main():"


async def test_choices_are_numbered_across_prompts(client: httpx2.AsyncClient) -> None:
    values = {"prompt": [[1, 2], [3]], "n": 2}
    content = (await client.post("/v1/completions", json=values)).json()
    assert [(c["index"], c["text"]) for c in content["choices"]] == [
        (0, "hello0 world"),
        (1, "hello1 world"),
        (2, "hello0 world"),
        (3, "hello1 world"),
    ]
    assert content["usage"] == usage_of(3, 8)
    texts = ["", "", "", ""]
    for event in await stream(client, "/v1/completions", values):
        for choice in event["choices"] if event else ():
            texts[choice["index"]] += choice["text"]
    assert texts == [c["text"] for c in content["choices"]]


async def test_a_completion_is_streamed(client: httpx2.AsyncClient) -> None:
    first, last, done = await stream(client, "/v1/completions", {"prompt": "x"})
    assert first["choices"][0]["text"] == "hello0"
    assert first["choices"][0]["finish_reason"] is None
    assert last["choices"][0]["finish_reason"] == "length"
    assert "usage" not in first
    assert done is None


async def test_a_streams_usage_comes_last(client: httpx2.AsyncClient) -> None:
    values = {"prompt": "x", "stream_options": {"include_usage": True}, "include_speculative_decoding": True}
    *chunks, usage, done = await stream(client, "/v1/completions", values)
    assert [chunk["usage"] for chunk in chunks] == [None, None]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2
    assert usage["usage"]["speculative_decoding"]["acceptance"] == "coupled"
    assert done is None


async def test_a_chat_is_answered_and_streamed(
    coordinator: Any, make_client: Callable[..., httpx2.AsyncClient]
) -> None:
    values = {"messages": [{"role": "user", "content": "hi"}]}
    async with make_client(coordinator, ChatTemplate(TEMPLATE)) as client:
        content = (await client.post("/v1/chat/completions", json=values)).json()
        assert content["object"] == "chat.completion"
        message = {"role": "assistant", "content": "hello0 world", "refusal": None}
        assert content["choices"][0]["message"] == message
        (call,) = coordinator.calls
        assert call.prompt == tuple(await coordinator.tokenize("[user]hi[a]", add_special_tokens=False))
        assert call.sampling.max_tokens is None
        *chunks, done = await stream(client, "/v1/chat/completions", values)
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
            {"role": "assistant", "content": ""},
            {"content": "hello0"},
            {"content": " world"},
        ]
        assert done is None


async def test_a_missing_chat_template_is_reported(client: httpx2.AsyncClient) -> None:
    values = {"messages": [{"role": "user", "content": "hi"}]}
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = await client.post(path, json=values)
        assert answer.status_code == 400
        assert "has no chat template" in answer.json()["error"]["message"]


async def test_tokens_without_text_make_no_event(
    coordinator: Any, client: httpx2.AsyncClient, commit: Any
) -> None:
    async def held_back(_: GenerateCall) -> AsyncIterator[Commit]:
        yield commit(0, "")
        yield commit(1, "é", finish=FinishReason.STOP)

    coordinator.script = held_back
    chunk, done = await stream(client, "/v1/completions", {"prompt": "x"})
    assert chunk["choices"][0]["text"] == "é"
    assert done is None


async def test_a_stop_reason_is_reported(coordinator: Any, client: httpx2.AsyncClient, commit: Any) -> None:
    async def stopped(_: GenerateCall) -> AsyncIterator[Commit]:
        part = commit(0, "x", finish=FinishReason.STOP)
        object.__setattr__(part.finish, "stop_string", "end")
        yield part

    coordinator.script = stopped
    (choice,) = (await client.post("/v1/completions", json={"prompt": "x"})).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "end")


async def test_logprobs_have_openais_form(
    coordinator: Any, commit: Any, make_client: Callable[..., httpx2.AsyncClient]
) -> None:
    async def reported(_: GenerateCall) -> AsyncIterator[Commit]:
        for index, entry in enumerate(TOKENS):
            finish = FinishReason.LENGTH if index else None
            yield commit(
                index, coordinator.vocabulary.token_text(entry.token_id), finish=finish, logprobs=(entry,)
            )

    coordinator.script = reported
    seventh = coordinator.vocabulary.token_text(7)
    async with make_client(coordinator, ChatTemplate(TEMPLATE)) as client:
        values: dict[str, Any] = {"prompt": "x", "logprobs": 2}
        (choice,) = (await client.post("/v1/completions", json=values)).json()["choices"]
        assert choice["logprobs"] == {
            "tokens": ["def", " ma"],
            "token_logprobs": [-0.5, -0.5],
            "top_logprobs": [{"def": -0.5, seventh: -9999.0}, {" ma": -0.5, seventh: -9999.0}],
            "text_offset": [0, 3],
        }
        *chunks, _ = await stream(client, "/v1/completions", values)
        offsets = [offset for c in chunks for offset in c["choices"][0]["logprobs"]["text_offset"]]
        assert offsets == [0, 3]

        values = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}
        (choice,) = (await client.post("/v1/chat/completions", json=values)).json()["choices"]
        first, second = choice["logprobs"]["content"]
        assert (first["token"], first["bytes"], first["logprob"]) == ("def", list(b"def"), -0.5)
        assert [top["token"] for top in second["top_logprobs"]] == [" ma", seventh]
        assert coordinator.calls[-1].sampling.logprobs == 2


async def test_echo_reports_the_prompt_for_every_choice(
    coordinator: Any, client: httpx2.AsyncClient, commit: Any
) -> None:
    async def echoed(call: GenerateCall) -> AsyncIterator[Commit]:
        assert call.sampling.prompt_logprobs == call.sampling.logprobs == 0
        for choice in range(2):
            yield Commit(0, (), (), "def ma", choice=choice)
        yield Commit(0, (), (), "", prompt_logprobs=TOKENS[1:])
        for choice in range(2):
            yield commit(0, "def", choice=choice, finish=FinishReason.LENGTH, logprobs=TOKENS[:1])

    coordinator.script = echoed
    values = {"prompt": [523, 614], "echo": True, "logprobs": 0, "n": 2}
    choices = (await client.post("/v1/completions", json=values)).json()["choices"]
    for choice in choices:
        assert choice["text"] == "def madef"
        assert choice["logprobs"]["tokens"] == ["def", " ma", "def"]
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
        assert choice["logprobs"]["top_logprobs"][0] is None
        assert choice["logprobs"]["text_offset"] == [0, 3, 6]


async def test_too_many_sequences_are_refused_before_any_begins(
    coordinator: Any, client: httpx2.AsyncClient
) -> None:
    def check_fits(n: int) -> None:
        if n > 3:
            raise InvalidArgumentError("n", "must be at most 3")

    coordinator.dispatcher.check_fits = check_fits
    answer = await client.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
    assert not coordinator.calls


async def test_prompt_logprobs_have_vllms_form(
    coordinator: Any, client: httpx2.AsyncClient, commit: Any
) -> None:
    async def reported(_: GenerateCall) -> AsyncIterator[Commit]:
        yield Commit(0, (), (), "", prompt_logprobs=TOKENS[1:])
        yield commit(0, "x", finish=FinishReason.LENGTH)

    coordinator.script = reported
    values = {"prompt": [523, 614], "prompt_logprobs": 2}
    (choice,) = (await client.post("/v1/completions", json=values)).json()["choices"]
    nothing, position = choice["prompt_logprobs"]
    assert nothing is None
    assert position["614"] == {"logprob": -0.5, "rank": 1, "decoded_token": " ma"}
    assert position["7"]["rank"] == 2


def failing(error: Exception, after: int, commit: Any) -> Any:
    async def script(_: GenerateCall) -> AsyncIterator[Commit]:
        for index in range(after):
            yield commit(index, "x")
        raise error

    return script


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_error_before_the_first_token_has_its_status(
    streamed: bool, coordinator: Any, client: httpx2.AsyncClient, commit: Any
) -> None:
    coordinator.script = failing(ResourceExhaustedError("full"), 0, commit)
    answer = await client.post("/v1/completions", json={"prompt": "x", "stream": streamed})
    assert answer.status_code == 429
    assert answer.json()["error"]["message"] == "full"


async def test_a_reported_prompt_is_not_a_token(
    coordinator: Any, client: httpx2.AsyncClient, commit: Any
) -> None:
    """It is sent before anything ran."""
    values = {"prompt": [523, 614], "stream": True, "echo": True, "logprobs": 0}

    async def failing_script(_: GenerateCall) -> AsyncIterator[Commit]:
        yield Commit(0, (), (), "def ma")
        yield Commit(0, (), (), "", prompt_logprobs=TOKENS[1:])
        raise ResourceExhaustedError("full")

    coordinator.script = failing_script
    assert (await client.post("/v1/completions", json=values)).status_code == 429

    async def ending(_: GenerateCall) -> AsyncIterator[Commit]:
        yield Commit(0, (), (), "def ma")
        yield Commit(0, (), (), "", prompt_logprobs=TOKENS[1:])
        yield Commit(0, (), (), "", Finish(FinishReason.STOP))

    coordinator.script = ending
    *chunks, done = await stream(client, "/v1/completions", values)
    assert done is None
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["def ma", "", ""]
    assert [chunk["choices"][0]["logprobs"]["tokens"] for chunk in chunks] == [["def"], [" ma"], []]


@pytest.mark.parametrize(
    ("error", "told"), [(UnavailableError("away", 1), "away"), (ValueError("secret"), "internal error")]
)
async def test_an_error_after_the_first_token_is_the_last_event(
    error: Exception, told: str, coordinator: Any, client: httpx2.AsyncClient, commit: Any
) -> None:
    coordinator.script = failing(error, 2, commit)
    *_, last = await stream(client, "/v1/completions", {"prompt": "x"})
    assert last["error"]["message"] == told
    answer = await client.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code in (500, 503)
    assert coordinator.running == 0


async def test_a_prompts_report_is_made_once_for_all_choices(
    coordinator: Any, client: httpx2.AsyncClient, commit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reported(_: GenerateCall) -> AsyncIterator[Commit]:
        yield Commit(0, (), (), "", prompt_logprobs=TOKENS[1:])
        for choice in range(3):
            yield commit(0, "x", choice=choice, finish=FinishReason.LENGTH, logprobs=TOKENS[:1])

    made = []
    for name in ("_ranked", "_likeliest"):
        make = getattr(LogprobWriter, name)

        def counted(writer: Any, entry: TokenLogprobs, make: Any = make) -> Any:
            made.append(entry.token_id)
            return make(writer, entry)

        monkeypatch.setattr(LogprobWriter, name, counted)
    coordinator.script = reported
    values = {"prompt": [[523, 614]] * 2, "n": 3, "echo": True, "logprobs": 2, "prompt_logprobs": 2}
    choices = (await client.post("/v1/completions", json=values)).json()["choices"]
    assert made.count(TOKENS[1].token_id) == 2 * len(values["prompt"])
    assert [choice["index"] for choice in choices] == list(range(6))
    for choice in choices:
        assert choice["prompt_logprobs"] == choices[0]["prompt_logprobs"]
        assert choice["logprobs"] == choices[0]["logprobs"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_leaves_ends_the_generation(
    streamed: bool, coordinator: Any, exchange: Any, commit: Any
) -> None:
    reading, forever = asyncio.Event(), asyncio.Event()

    async def endless(_: GenerateCall) -> AsyncIterator[Commit]:
        yield commit(0, "x")
        reading.set()
        await forever.wait()

    coordinator.script = endless
    body = orjson.dumps({"prompt": "x", "stream": streamed})
    asked = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        return next(asked, None) or await exchange.receive()

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    answering = asyncio.create_task(make_app(coordinator, None)(scope, receive, exchange.send))
    async with asyncio.timeout(HANG):
        await reading.wait()
        assert coordinator.running == 1
        exchange.leave.set()
        await answering
    assert coordinator.running == 0
    assert not exchange.complete


async def test_a_slow_client_is_not_read_ahead(coordinator: Any, exchange: Any, commit: Any) -> None:
    """Unread tokens stay where they are counted."""
    given = 0

    async def endless(_: GenerateCall) -> AsyncIterator[Commit]:
        nonlocal given
        while True:
            given += 1
            yield commit(given - 1, "x")

    taken, may_take = asyncio.Event(), asyncio.Semaphore(3)

    async def send(message: Any) -> None:
        if may_take.locked():
            taken.set()
        await may_take.acquire()
        await exchange.send(message)

    coordinator.script = endless
    wanted = SimpleRequest()
    call = GenerateCall("", "x", wanted.sampling, wanted.speculation)
    answer = Answer(coordinator, [call], lambda _: Plain(), wanted, "id")  # type: ignore[arg-type]
    answering = asyncio.create_task(answer({}, exchange.receive, send))
    async with asyncio.timeout(HANG):
        await taken.wait()
    assert given == 3  # the status line and two events were taken, the third event is on its way
    exchange.leave.set()
    await answering


class SimpleRequest:
    """As much of a request as an answer needs."""

    stream = True
    include_usage = tells_usage_so_far = scores_only = False
    names: dict[str, str] = {}  # noqa: RUF012
    sampling = SamplingParams()
    speculation = SpeculationParams()


class Plain:
    """A wording of one member."""

    def opening(self) -> list[dict[str, Any]]:
        return []

    def chunks(self, choice: int, commit: Commit) -> list[dict[str, Any]]:
        return [{"text": commit.text}]


async def test_an_answer_that_never_began_raises(coordinator: Any, exchange: Any) -> None:
    coordinator.refusal = UnavailableError("away")
    wanted = SimpleRequest()
    call = GenerateCall("", "x", wanted.sampling, wanted.speculation)
    answer = Answer(coordinator, [call], lambda _: Plain(), wanted, "id")  # type: ignore[arg-type]
    with pytest.raises(HttpError, match="away"):
        await answer({}, exchange.receive, exchange.send)
    assert not exchange.sent
