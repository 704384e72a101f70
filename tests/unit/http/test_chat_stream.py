"""Streams of several choices: to the helper of OpenAI's client that gathers them, and with their usage."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from coordinator.sequence.ledger import Commit, Finish
from paceline.core.types import FinishReason, TokenLogprobs, TokenOrigin
from paceline.rpc.codec import GenerateCall
from tests.unit.http.api import CHATS, COMPLETIONS, Api, commit, script

TOKENS = tuple(TokenLogprobs(token, -0.5, 1, (token,), (-0.5,)) for token in (523, 614))


async def test_choices_are_opened_in_order(coordinator: Any, api: Api) -> None:
    """OpenAI's helper keeps them in a list and expects choice 0 first."""

    async def backwards(call: GenerateCall) -> AsyncIterator[Commit]:
        for choice in reversed(range(call.sampling.n)):
            yield commit(0, f"hello{choice}", choice=choice, logprobs=TOKENS[:1])
        for choice in reversed(range(call.sampling.n)):
            yield commit(1, "", FinishReason.STOP, choice, logprobs=TOKENS[1:])

    coordinator.script = backwards
    async with (
        openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=api) as client,
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
        assert [token.token for token in choice.logprobs.content] == ["def", " ma"]


@pytest.mark.parametrize(("path", "openings"), [(COMPLETIONS, 0), (CHATS, 2)])
async def test_every_event_has_usage_on_request(path: str, openings: int, coordinator: Any, api: Api) -> None:
    """Over all choices. Tokens without text count in the next event."""
    coordinator.script = script(
        Commit(0, (), (), "told", choice=0),
        Commit(0, (5, 6), (TokenOrigin.TARGET,) * 2, "one", choice=0),
        commit(0, "", choice=1),
        commit(1, "two", FinishReason.LENGTH, choice=1),
        Commit(2, (), (), "", Finish(FinishReason.LENGTH), choice=0),
    )
    options = {"include_usage": True, "continuous_usage_stats": True}
    values = {"n": 2, "include_speculative_decoding": True}
    *chunks, last = await api.stream(path, **values, stream_options=options)
    without = await api.stream(path, **values, stream_options={"include_usage": True})
    prompt = last["usage"]["prompt_tokens"]
    told = [
        {"prompt_tokens": prompt, "completion_tokens": so_far, "total_tokens": prompt + so_far}
        for so_far in (*[0] * openings, 0, 2, 4, 4)
    ]
    assert prompt >= 4
    assert [chunk["usage"] for chunk in chunks] == told
    assert last["choices"] == []
    assert "speculative_decoding" in last["usage"]
    for chunk, other in zip(chunks, without, strict=False):
        assert chunk["choices"] == other["choices"]
        assert other["usage"] is None
