"""Small bodies that would take long to parse."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.api.http.openai.schema.bodies import ChatRequest, CompletionRequest
from coordinator.api.http.server import body
from coordinator.api.http.server.body import parse
from coordinator.api.http.server.errors import HttpError
from paceline.core import limits

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text('a"\\,[]{}:\n\x00é'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('a"\\,[]{}'), inner),
    max_leaves=20,
)


def shape(value: Any) -> tuple[int, int]:
    """Objects and lists; commas between their items."""
    if not isinstance(value, list | dict):
        return 0, 0
    inner = [shape(item) for item in (value.values() if isinstance(value, dict) else value)]
    return 1 + sum(c for c, _ in inner), max(0, len(inner) - 1) + sum(v for _, v in inner)


@given(JSON, st.booleans())
def test_brackets_in_texts_are_not_counted(value: Any, ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    rest = body._without_texts(raw)
    assert (rest.count(b"{") + rest.count(b"["), rest.count(b",")) == shape(value)


@pytest.mark.parametrize(
    ("containers", "values", "refused"), [(4, 6, False), (3, 6, True), (4, 5, True), (9, 9, False)]
)
def test_containers_and_values_are_bounded(
    containers: int, values: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_JSON_CONTAINERS", containers)
    monkeypatch.setattr(limits, "MAX_JSON_VALUES", values)
    raw = b'{"prompt": [[1, 2], [3]], "n": 1, "stream": false, "user": "[[[,,,,"}'
    if not refused:
        assert parse(raw, CompletionRequest).user == "[[[,,,,"
        return
    with pytest.raises(HttpError) as failure:
        parse(raw, CompletionRequest)
    assert (failure.value.status, failure.value.code) == (400, "too_many_values")


def test_the_longest_prompt_is_within_every_bound() -> None:
    ids = b'{"prompt": [' + b",".join([b"151000"] * limits.MAX_PROMPT_TOKENS) + b'], "max_tokens": 1}'
    text = b'{"prompt": "' + b"{" * limits.MAX_PROMPT_CHARACTERS + b'", "max_tokens": 1}'
    for raw in (ids, text):
        assert len(raw) <= limits.MAX_HTTP_BODY_BYTES
        assert parse(raw, CompletionRequest).max_tokens == 1


@pytest.mark.parametrize(
    ("model", "raw", "param"),
    [
        (CompletionRequest, b'{"prompt": [1, %s]}', "prompt[1]"),
        (CompletionRequest, b'{"prompt": [[1], %s]}', "prompt[1]"),
        (CompletionRequest, b'{"prompt": "a", "stop_token_ids": [1, %s]}', "stop_token_ids[1]"),
        (ChatRequest, b'{"messages": [%s]}', "messages[0].role"),
        (ChatRequest, b'{"messages": [{"role": "user", "content": [%s]}]}', "messages[0].content[0].type"),
    ],
)
def test_a_list_is_refused_by_its_first_bad_item(model: Any, raw: bytes, param: str) -> None:
    """Reports on each of 10 MiB of bad items took more than a minute to make."""
    with pytest.raises(HttpError) as failure:
        parse(raw % b",".join([b"{}"] * 1000), model)
    assert failure.value.param == param
    cause: Any = failure.value.__context__
    assert cause.error_count() <= 3


def test_the_number_of_messages_is_bounded() -> None:
    message = b'{"role": "user", "content": "a"}'
    with pytest.raises(HttpError, match="at most"):
        parse(b'{"messages": [' + b",".join([message] * (limits.MAX_MESSAGES + 1)) + b"]}", ChatRequest)
