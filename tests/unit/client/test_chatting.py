"""Conversations: rendered by the server, then generated from as any prompt, with both clients."""

from __future__ import annotations

from typing import Any

import pytest
from harness.refusals import refused

from paceline import SamplingParams
from paceline.core.errors import UnavailableError
from paceline.rpc.codec import UNLIMITED_MAX_TOKENS

MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi", "name": None}]
PROMPT = tuple(b"[system]be kind[user]hi")


def test_a_chat_generates_from_the_rendered_prompt(server: Any, client: Any) -> None:
    result = client.chat(
        MESSAGES, {"temperature": 0.5}, cache_salt="mine", speculation={"acceptance": "block"}
    )
    assert result.text == "Hello!"
    rendered, generated = server.requests
    assert [(m.role, m.content, m.name) for m in rendered.messages] == [
        ("system", "be kind", ""),
        ("user", "hi", ""),
    ]
    assert not rendered.HasField("add_generation_prompt")
    assert tuple(generated.token_ids.ids) == PROMPT
    assert generated.sampling.temperature == 0.5
    assert generated.cache_salt == "mine"


def test_a_streamed_chat_comes_in_chunks(client: Any) -> None:
    stream = client.stream_chat(MESSAGES)
    assert "".join(chunk.text for chunk in stream) == stream.result.text == "Hello!"


def test_prompt_ending_options_are_sent(server: Any, client: Any) -> None:
    options = {"continue_final_message": True, "add_generation_prompt": False}
    client.chat(MESSAGES, chat_template_kwargs={"thinking": True}, **options)
    rendered, _ = server.requests
    assert rendered.continue_final_message
    assert rendered.HasField("add_generation_prompt")
    assert not rendered.add_generation_prompt
    assert rendered.variables == '{"thinking": true}'
    assert client.apply_chat_template(MESSAGES, **options) == PROMPT


@pytest.mark.parametrize(
    ("sampling", "limit"),
    [
        (None, UNLIMITED_MAX_TOKENS),
        ({"seed": 1}, UNLIMITED_MAX_TOKENS),
        ({"max_tokens": 5}, 5),
        (SamplingParams(), 16),
    ],
)
def test_a_chat_without_a_limit_may_fill_the_length(
    sampling: Any, limit: int, server: Any, client: Any
) -> None:
    client.chat(MESSAGES, sampling)
    assert server.requests[-1].sampling.max_tokens == limit


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("hello", "messages"),
        (["hello"], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content"),
        ([{"role": "user", "content": "x", "weight": 1}], "messages[0].weight"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
    ],
)
def test_a_wrong_message_is_refused_before_sending(
    messages: Any, field: str, server: Any, client: Any
) -> None:
    for ask in (client.chat, client.stream_chat, client.apply_chat_template):
        with refused(field):
            ask(messages)
    assert not server.requests


def test_an_unknown_argument_is_refused_before_sending(server: Any, client: Any) -> None:
    for ask in (client.chat, client.stream_chat, client.apply_chat_template):
        with pytest.raises(TypeError, match="add_generation_promt"):
            ask(MESSAGES, add_generation_promt=False)
    assert not server.requests


@pytest.mark.parametrize("variables", ["x", {"a": object()}, {"a": float("nan")}])
def test_template_variables_must_be_json(variables: Any, client: Any) -> None:
    with refused("chat_template_kwargs"):
        client.chat(MESSAGES, chat_template_kwargs=variables)


def test_a_broken_chat_requests_its_prompt_again(server: Any, connect: Any, messages: Any) -> None:
    again = (messages.good[0], *messages.good[2:])
    server.play_calls((messages.good[:2], UnavailableError("away")), (again, None))
    assert connect(server.address).chat(MESSAGES).text == "Hello!"
    rendered, first, second = server.requests
    assert type(rendered).__name__ == "ApplyChatTemplateRequest"
    assert first.token_ids == second.token_ids
    assert list(second.resume_from) == [1]
