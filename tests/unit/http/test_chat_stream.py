"""Streams of several choices: to the helper of OpenAI's client that gathers them, and with their usage."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import openai
import pytest

from coordinator.api.chat_template import ChatTemplate
from coordinator.sequence.ledger import Commit, Finish
from paceline.core.types import FinishReason, TokenLogprobs, TokenOrigin
from paceline.rpc.codec import GenerateCall
from tests.unit.http.test_answer import stream as streamed

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
TOKENS = tuple(TokenLogprobs(token, -0.5, 1, (token,), (-0.5,)) for token in (523, 614))


async def test_choices_are_opened_in_order(
    coordinator: Any, commit: Any, make_client: Callable[..., httpx2.AsyncClient]
) -> None:
    """OpenAI's helper keeps them in a list and expects choice 0 first."""

    async def backwards(call: GenerateCall) -> AsyncIterator[Commit]:
        for choice in reversed(range(call.sampling.n)):
            yield commit(0, f"hello{choice}", choice=choice, logprobs=TOKENS[:1])
        for choice in reversed(range(call.sampling.n)):
            yield commit(1, "", choice=choice, finish=FinishReason.STOP, logprobs=TOKENS[1:])

    coordinator.script = backwards
    async with (
        make_client(coordinator, ChatTemplate(TEMPLATE)) as transport,
        openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=transport) as client,
        client.chat.completions.stream(
            model="a/model", messages=[{"role": "user", "content": "hi"}], n=3, logprobs=True
        ) as stream,
    ):
        chunks = [event.chunk async for event in stream if event.type == "chunk"]
        final = await stream.get_final_completion()

    openings = [choice.model_dump() for chunk in chunks[:3] for choice in chunk.choices]
    assert [opening["index"] for opening in openings] == [0, 1, 2]
    for opening in openings:
        assert (opening["delta"]["role"], opening["delta"]["content"]) == ("assistant", "")
        assert (opening["logprobs"], opening["finish_reason"], opening["stop_reason"]) == (None, None, None)
    assert [chunk.choices[0].index for chunk in chunks[3:]] == [2, 1, 0, 2, 1, 0]
    assert [choice.index for choice in final.choices] == [0, 1, 2]
    for choice in final.choices:
        assert (choice.message.content, choice.finish_reason) == (f"hello{choice.index}", "stop")
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [token.token for token in choice.logprobs.content] == ["def", " ma"]


@pytest.mark.parametrize(
    ("path", "asked", "openings"),
    [
        ("/v1/completions", {"prompt": "def main():"}, 0),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "def main():"}]}, 2),
    ],
)
async def test_every_event_has_usage_on_request(
    path: str,
    asked: dict[str, Any],
    openings: int,
    coordinator: Any,
    commit: Any,
    make_client: Callable[..., httpx2.AsyncClient],
) -> None:
    """Over all choices. Tokens without text count in the next event."""

    async def script(_: GenerateCall) -> AsyncIterator[Commit]:
        yield Commit(0, (), (), "told", choice=0)
        yield Commit(0, (5, 6), (TokenOrigin.TARGET,) * 2, "one", choice=0)
        yield commit(0, "", choice=1)
        yield commit(1, "two", choice=1, finish=FinishReason.LENGTH)
        yield Commit(2, (), (), "", Finish(FinishReason.LENGTH), choice=0)

    coordinator.script = script
    options = {"include_usage": True, "continuous_usage_stats": True}
    values = {**asked, "n": 2, "stream_options": options, "include_speculative_decoding": True}
    async with make_client(coordinator, ChatTemplate(TEMPLATE)) as client:
        *chunks, last, done = await streamed(client, path, values)
        without = await streamed(client, path, {**values, "stream_options": {"include_usage": True}})
    told = [
        {"prompt_tokens": 4, "completion_tokens": so_far, "total_tokens": 4 + so_far}
        for so_far in (*[0] * openings, 0, 2, 4, 4)
    ]
    assert [chunk["usage"] for chunk in chunks] == told
    assert (last["choices"], done) == ([], None)
    assert "speculative_decoding" in last["usage"]
    for chunk, other in zip(chunks, without, strict=False):
        assert chunk["choices"] == other["choices"]
        assert other["usage"] is None
