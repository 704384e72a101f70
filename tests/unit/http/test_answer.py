"""Answers, whole and streamed; clients that leave and requests that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from coordinator.api.http.openai.answer import Answer
from coordinator.api.http.openai.logprobs import LogprobWriter
from coordinator.api.http.server.errors import HttpError
from coordinator.sequence.ledger import Commit, Finish
from paceline.core.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError
from paceline.core.types import FinishReason, SamplingParams, SpeculationParams, TokenLogprobs
from paceline.rpc.codec import GenerateCall
from tests.unit.http.api import CHATS, HANG, LEAST, Api, Exchange, commit, script

TOKENS = tuple(TokenLogprobs(token, -0.5, 1, (token, 7), (-0.5, float("-inf"))) for token in (523, 614))
REPORT = Commit(0, (), (), "", prompt_logprobs=TOKENS[1:])


def usage_of(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


async def test_a_completion_has_choices_and_usage(api: Api, coordinator: Any) -> None:
    answer = await api.ask(model="a/model")
    content = answer.json()
    assert answer.headers["x-request-id"] == content["id"]
    assert content["object"] == "text_completion"
    assert content["choices"] == [
        {"index": 0, "text": "hello0 world", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert content["usage"] == usage_of(4, 2)
    assert [call.prompt for call in coordinator.calls] == ["def main():"]


async def test_choices_are_numbered_across_prompts(api: Api) -> None:
    values = {"prompt": [[1, 2], [3]], "n": 2}
    content = await api.answer(**values)
    want = ["hello0 world", "hello1 world", "hello0 world", "hello1 world"]
    assert [(c["index"], c["text"]) for c in content["choices"]] == list(enumerate(want))
    assert content["usage"] == usage_of(3, 8)
    texts = ["", "", "", ""]
    for event in await api.stream(**values):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == want


async def test_a_streams_usage_comes_last_on_request(api: Api) -> None:
    first, last = await api.stream()
    assert [chunk["choices"][0]["text"] for chunk in (first, last)] == ["hello0", " world"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in (first, last)] == [None, "length"]
    assert "usage" not in first
    values = {"stream_options": {"include_usage": True}, "include_speculative_decoding": True}
    *chunks, usage = await api.stream(**values)
    assert [chunk["usage"] for chunk in chunks] == [None, None]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2
    assert usage["usage"]["speculative_decoding"]["acceptance"] == "coupled"


async def test_a_chat_is_answered_and_streamed(api: Api, coordinator: Any) -> None:
    content = await api.answer(CHATS)
    assert content["object"] == "chat.completion"
    message = {"role": "assistant", "content": "hello0 world", "refusal": None}
    assert content["choices"][0]["message"] == message
    (call,) = coordinator.calls
    assert call.prompt == tuple(await coordinator.tokenize("[def main():][a]", add_special_tokens=False))
    assert call.sampling.max_tokens is None
    chunks = await api.stream(CHATS)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    opening = {"role": "assistant", "content": ""}
    told = [opening, {"content": "hello0"}, {"content": " world"}]
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == told


async def test_a_missing_chat_template_is_reported(coordinator: Any) -> None:
    async with Api(coordinator, template=None) as api:
        for path in (CHATS, "/tokenize"):
            assert "has no chat template" in (await api.refusal(path, **LEAST[CHATS]))["message"]


async def test_tokens_without_text_make_no_event(coordinator: Any, api: Api) -> None:
    coordinator.script = script(commit(0, ""), commit(1, "é", FinishReason.STOP))
    assert [event["choices"][0]["text"] for event in await api.stream()] == ["é"]


async def test_a_stop_reason_is_reported(coordinator: Any, api: Api) -> None:
    part = commit(0, "x", FinishReason.STOP)
    object.__setattr__(part.finish, "stop_string", "end")
    coordinator.script = script(part)
    choice = await api.choice()
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "end")


async def test_logprobs_have_openais_form(coordinator: Any, api: Api) -> None:
    first, second = (coordinator.vocabulary.token_text(entry.token_id) for entry in TOKENS)
    coordinator.script = script(
        commit(0, first, logprobs=TOKENS[:1]), commit(1, second, FinishReason.LENGTH, logprobs=TOKENS[1:])
    )
    seventh = coordinator.vocabulary.token_text(7)
    choice = await api.choice(logprobs=2)
    assert choice["logprobs"] == {
        "tokens": ["def", " ma"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"def": -0.5, seventh: -9999.0}, {" ma": -0.5, seventh: -9999.0}],
        "text_offset": [0, 3],
    }
    chunks = await api.stream(logprobs=2)
    assert [offset for c in chunks for offset in c["choices"][0]["logprobs"]["text_offset"]] == [0, 3]

    choice = await api.choice(CHATS, logprobs=True, top_logprobs=2)
    first, second = choice["logprobs"]["content"]
    assert (first["token"], first["bytes"], first["logprob"]) == ("def", list(b"def"), -0.5)
    assert [top["token"] for top in second["top_logprobs"]] == [" ma", seventh]
    assert coordinator.calls[-1].sampling.logprobs == 2


async def test_echo_reports_the_prompt_for_every_choice(coordinator: Any, api: Api) -> None:
    coordinator.script = script(
        *(Commit(0, (), (), "def ma", choice=choice) for choice in range(2)),
        REPORT,
        *(commit(0, "def", FinishReason.LENGTH, choice, logprobs=TOKENS[:1]) for choice in range(2)),
    )
    answer = await api.answer(prompt=[523, 614], echo=True, logprobs=0, n=2)
    for choice in answer["choices"]:
        assert choice["text"] == "def madef"
        assert choice["logprobs"]["tokens"] == ["def", " ma", "def"]
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
        assert choice["logprobs"]["top_logprobs"][0] is None
        assert choice["logprobs"]["text_offset"] == [0, 3, 6]
    asked = coordinator.calls[0].sampling
    assert asked.prompt_logprobs == asked.logprobs == 0


async def test_too_many_sequences_are_refused_before_any_begins(coordinator: Any, api: Api) -> None:
    def check_fits(n: int) -> None:
        if n > 3:
            raise InvalidArgumentError("n", "must be at most 3")

    coordinator.dispatcher.check_fits = check_fits
    assert (await api.refusal(prompt=["a", "b"], n=2))["param"] == "n"
    assert not coordinator.calls


async def test_prompt_logprobs_have_vllms_form(coordinator: Any, api: Api) -> None:
    coordinator.script = script(REPORT, commit(0, "x", FinishReason.LENGTH))
    nothing, position = (await api.choice(prompt=[523, 614], prompt_logprobs=2))["prompt_logprobs"]
    assert nothing is None
    assert position["614"] == {"logprob": -0.5, "rank": 1, "decoded_token": " ma"}
    assert position["7"]["rank"] == 2


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_error_before_the_first_token_has_its_status(
    streamed: bool, coordinator: Any, api: Api
) -> None:
    coordinator.script = script(error=ResourceExhaustedError("full"))
    assert (await api.refusal(status=429, stream=streamed))["message"] == "full"


async def test_a_reported_prompt_is_not_a_token(coordinator: Any, api: Api) -> None:
    """It is sent before anything ran."""
    values = {"prompt": [523, 614], "echo": True, "logprobs": 0}
    parts = [Commit(0, (), (), "def ma"), REPORT]
    coordinator.script = script(*parts, error=ResourceExhaustedError("full"))
    await api.refusal(**values, stream=True, status=429)
    coordinator.script = script(*parts, Commit(0, (), (), "", Finish(FinishReason.STOP)))
    chunks = await api.stream(**values)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["def ma", "", ""]
    assert [chunk["choices"][0]["logprobs"]["tokens"] for chunk in chunks] == [["def"], [" ma"], []]


@pytest.mark.parametrize(
    ("error", "told", "status"),
    [(UnavailableError("away", 1), "away", 503), (ValueError("secret"), "internal error", 500)],
)
async def test_an_error_after_the_first_token_is_the_last_event(
    error: Exception, told: str, status: int, coordinator: Any, api: Api
) -> None:
    coordinator.script = script(commit(0, "x"), commit(1, "x"), error=error)
    *_, last = await api.stream()
    assert last["error"]["message"] == told
    await api.refusal(status=status)
    assert coordinator.running == 0


async def test_a_prompts_report_is_made_once_for_all_choices(
    coordinator: Any, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for name in ("_ranked", "_likeliest"):
        make = getattr(LogprobWriter, name)

        def counted(writer: Any, entry: TokenLogprobs, make: Any = make) -> Any:
            made.append(entry.token_id)
            return make(writer, entry)

        monkeypatch.setattr(LogprobWriter, name, counted)
    ends = (commit(0, "x", FinishReason.LENGTH, choice, logprobs=TOKENS[:1]) for choice in range(3))
    coordinator.script = script(REPORT, *ends)
    prompts = [[523, 614]] * 2
    answer = await api.answer(prompt=prompts, n=3, echo=True, logprobs=2, prompt_logprobs=2)
    assert made.count(TOKENS[1].token_id) == 2 * len(prompts)
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    for name in ("prompt_logprobs", "logprobs"):
        assert [choice[name] for choice in choices] == [choices[0][name]] * 6


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_leaves_ends_the_generation(
    streamed: bool, coordinator: Any, exchange: Exchange
) -> None:
    reading, forever = asyncio.Event(), asyncio.Event()

    async def endless(_: GenerateCall) -> AsyncIterator[Commit]:
        yield commit(0, "x")
        reading.set()
        await forever.wait()

    coordinator.script = endless
    answering = exchange.begin(coordinator, stream=streamed)
    async with asyncio.timeout(HANG):
        await reading.wait()
        assert coordinator.running == 1
        exchange.leave.set()
        await answering
    assert coordinator.running == 0
    assert not [message for message in exchange.sent if message.get("more_body") is False]


class Request:
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


def answer_of(coordinator: Any) -> Any:
    call = GenerateCall("", "x", Request.sampling, Request.speculation)
    return Answer(coordinator, [call], lambda _: Plain(), Request(), "id")


async def test_a_slow_client_is_not_read_ahead(coordinator: Any, exchange: Exchange) -> None:
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
    answering = asyncio.create_task(answer_of(coordinator)({}, exchange.receive, send))
    async with asyncio.timeout(HANG):
        await taken.wait()
    assert given == 3  # the status line and two events were taken, the third event is on its way
    exchange.leave.set()
    await answering


async def test_an_answer_that_never_began_raises(coordinator: Any, exchange: Exchange) -> None:
    coordinator.refusal = UnavailableError("away")
    with pytest.raises(HttpError, match="away"):
        await answer_of(coordinator)({}, exchange.receive, exchange.send)
    assert not exchange.sent
