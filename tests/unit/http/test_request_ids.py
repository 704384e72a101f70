"""A client's `x-request-id`: in the answer and the log, or refused."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from coordinator.telemetry.call_log import Call
from paceline.core.errors import UnavailableError

BODY = {"prompt": "x", "max_tokens": 2}
GIVEN = "front-4711/a=b"


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
async def test_a_given_id_is_the_calls(
    client: httpx2.AsyncClient, contexts: list[dict[str, Any]], stream: bool
) -> None:
    answer = await client.post(
        "/v1/completions", json=BODY | {"stream": stream}, headers={"x-request-id": GIVEN}
    )
    assert answer.status_code == 200
    assert answer.headers.get_list("x-request-id") == [GIVEN]
    (context,) = contexts
    assert context["request_id"] == GIVEN
    assert context["response_id"].startswith("cmpl-")
    if not stream:
        assert context["response_id"] == answer.json()["id"]


async def test_without_an_id_the_answers_is_used(
    client: httpx2.AsyncClient, contexts: list[dict[str, Any]]
) -> None:
    answer = await client.post("/v1/completions", json=BODY)
    assert answer.headers["x-request-id"] == answer.json()["id"] == contexts[0]["request_id"]
    assert "response_id" not in contexts[0]


async def test_two_calls_may_have_the_same_id(client: httpx2.AsyncClient, coordinator: Any) -> None:
    for _ in range(2):
        answer = await client.post("/v1/completions", json=BODY, headers={"x-request-id": GIVEN})
        assert answer.status_code == 200
    assert len({call.request_id for call in coordinator.calls}) == 2


@pytest.mark.parametrize("path", ["/version", "/nowhere", "/v1/models"])
async def test_every_answer_has_the_request_id(
    client: httpx2.AsyncClient, coordinator: Any, path: str
) -> None:
    answer = await client.get(path, headers={"x-request-id": GIVEN})
    assert answer.headers["x-request-id"] == GIVEN


async def test_errors_have_the_request_id(client: httpx2.AsyncClient, coordinator: Any) -> None:
    coordinator.refusal = UnavailableError("away")
    answer = await client.post("/v1/completions", json=BODY, headers={"x-request-id": GIVEN})
    assert answer.status_code == 503
    assert answer.headers["x-request-id"] == GIVEN


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
    client: httpx2.AsyncClient, coordinator: Any, headers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    answer = await client.post("/v1/completions", json=BODY, headers=headers)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "x-request-id"
    assert "printable ASCII characters without spaces" in error["message"]
    assert "x-request-id" not in answer.headers
    assert coordinator.calls == []
    assert ended(caplog)["field"] == "x-request-id"


async def test_the_longest_id_is_accepted(client: httpx2.AsyncClient) -> None:
    answer = await client.get("/version", headers={"x-request-id": "x" * 128})
    assert answer.headers["x-request-id"] == "x" * 128


# ---- what a refused request's line says --------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "max_tokens": 10**6}, "max_tokens"),
        ({"prompt": [["x"]]}, "prompt"),
        ({"prompt": "x", "no_such": 1}, "no_such"),
        ({"prompt": "x", "what I had for dinner": 1}, "other"),
        ({"prompt": "x", "x" * 65: 1}, "other"),
    ],
)
async def test_a_refused_requests_log_line_names_the_field(
    client: httpx2.AsyncClient, body: Any, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert ended(caplog)["field"].partition("[")[0] == field
    assert "dinner" not in caplog.text


async def test_a_served_requests_log_line_names_no_field(
    client: httpx2.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await client.post("/v1/completions", json=BODY)
    assert "field" not in ended(caplog)
