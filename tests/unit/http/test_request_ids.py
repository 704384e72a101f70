"""A client's `x-request-id`: in the answer and the log, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.telemetry.call_log import Call
from paceline.core.errors import UnavailableError
from tests.unit.http.api import COMPLETIONS, LEAST, Api

BODY = LEAST[COMPLETIONS]
GIVEN = {"x-request-id": "front-4711/a=b"}


def ended(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    """The fields of the only call's last line."""
    (record,) = [record for record in caplog.records if record.getMessage() == "call ended"]
    fields: dict[str, Any] = record.fields  # type: ignore[attr-defined]
    return fields


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The fields that every line of a call has, one entry a call."""
    seen: list[dict[str, Any]] = []
    finish = Call.finish

    def finished(call: Call, code: str, now: float) -> None:
        seen.append(call.context)
        finish(call, code, now)

    monkeypatch.setattr(Call, "finish", finished)
    return seen


@pytest.mark.parametrize("stream", [False, True])
async def test_a_given_id_is_the_calls(api: Api, contexts: list[dict[str, Any]], stream: bool) -> None:
    answer = await api.post(COMPLETIONS, json=BODY | {"stream": stream}, headers=GIVEN)
    assert answer.status_code == 200
    assert answer.headers.get_list("x-request-id") == [GIVEN["x-request-id"]]
    (context,) = contexts
    assert context["request_id"] == GIVEN["x-request-id"]
    assert context["response_id"].startswith("cmpl-")
    if not stream:
        assert context["response_id"] == answer.json()["id"]


async def test_without_an_id_the_answers_is_used(api: Api, contexts: list[dict[str, Any]]) -> None:
    answer = await api.ask()
    assert answer.headers["x-request-id"] == answer.json()["id"] == contexts[0]["request_id"]
    assert "response_id" not in contexts[0]


async def test_two_calls_may_have_the_same_id(api: Api, coordinator: Any) -> None:
    for _ in range(2):
        assert (await api.post(COMPLETIONS, json=BODY, headers=GIVEN)).status_code == 200
    assert len({call.request_id for call in coordinator.calls}) == 2


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/version", 200),
        ("GET", "/nowhere", 404),
        ("GET", "/v1/models", 200),
        ("POST", COMPLETIONS, 503),
    ],
)
async def test_every_answer_has_the_request_id(
    api: Api, coordinator: Any, method: str, path: str, status: int
) -> None:
    coordinator.refusal = UnavailableError("away")
    for given in (GIVEN, {"x-request-id": "x" * 128}):
        answer = await api.request(method, path, json=BODY, headers=given)
        assert (answer.status_code, answer.headers["x-request-id"]) == (status, given["x-request-id"])


@pytest.mark.parametrize(
    "headers",
    [
        [("x-request-id", "")],
        [("x-request-id", "a b")],
        [("x-request-id", "x" * 129)],
        [("x-request-id", "schlüssel".encode())],
        [("x-request-id", "a"), ("x-request-id", "b")],
    ],
)
async def test_an_unusable_id_is_refused_by_name(
    api: Api, coordinator: Any, headers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    answer = await api.post(COMPLETIONS, json=BODY, headers=headers)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "x-request-id"
    assert "printable ASCII characters without spaces" in error["message"]
    assert "x-request-id" not in answer.headers
    assert coordinator.calls == []
    assert ended(caplog)["field"] == "x-request-id"


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"prompt": [["x"]]}, "prompt"),
        ({"no_such": 1}, "no_such"),
        ({"what I had for dinner": 1}, "other"),
        ({"x" * 65: 1}, "other"),
        ({}, ""),
    ],
)
async def test_a_requests_log_line_names_a_refused_field(
    api: Api, values: Any, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert (await api.ask(**values)).status_code == (400 if field else 200)
    assert ended(caplog).get("field", "").partition("[")[0] == field
    assert "dinner" not in caplog.text
