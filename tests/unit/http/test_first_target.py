"""A request waits for the first target unless its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx2
import orjson
import pytest

from coordinator.api.chat_template import ChatTemplate
from coordinator.api.http.app import make_app
from coordinator.auth import Gate
from paceline.core.errors import UnavailableError
from paceline.core.security.keys import ApiKey, KeyRing, digest

HANG = 30.0
REQUESTS = [
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
]


@pytest.fixture
def waiting(coordinator: Any, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when somebody waits; the coordinator has no target."""
    begun, wait = asyncio.Event(), type(coordinator).wait_for_target

    async def observed(of: Any) -> None:
        begun.set()
        await wait(of)

    monkeypatch.setattr(type(coordinator), "wait_for_target", observed)
    coordinator.found.clear()
    return begun


@pytest.mark.parametrize(("path", "values"), REQUESTS)
async def test_a_request_waits_for_the_first_target(
    path: str,
    values: dict[str, Any],
    waiting: asyncio.Event,
    coordinator: Any,
    make_client: Callable[..., httpx2.AsyncClient],
) -> None:
    async with make_client(coordinator, ChatTemplate("{{ messages[0].content }}")) as client:
        answering = asyncio.create_task(client.post(path, json=values))
        async with asyncio.timeout(HANG):
            await asyncio.wait(
                (answering, asyncio.create_task(waiting.wait())), return_when=asyncio.FIRST_COMPLETED
            )
            coordinator.found.set()
            answer = await answering
    assert (answer.status_code, answer.json()["model"]) == (200, "a/model")


async def test_without_a_target_the_answer_is_503(
    waiting: asyncio.Event, coordinator: Any, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def too_late(_: Any) -> None:
        raise UnavailableError("no target worker is available")

    monkeypatch.setattr(type(coordinator), "wait_for_target", too_late)
    answer = await client.post("/v1/completions", json={"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "no target worker is available")
    assert not coordinator.calls


async def test_a_client_that_leaves_ends_the_wait(
    waiting: asyncio.Event, coordinator: Any, exchange: Any
) -> None:
    asked = iter([{"type": "http.request", "body": orjson.dumps({"prompt": "x"}), "more_body": False}])

    async def receive() -> Any:
        return next(asked, None) or await exchange.receive()

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    answering = asyncio.create_task(make_app(coordinator, None)(scope, receive, exchange.send))
    async with asyncio.timeout(HANG):
        await waiting.wait()
        exchange.leave.set()
        await answering
    assert exchange.sent[0]["status"] == 499
    assert not coordinator.calls


@pytest.mark.parametrize(("path", "values"), REQUESTS)
async def test_a_keys_limit_covers_waiting_requests(
    path: str, values: dict[str, Any], waiting: asyncio.Event, coordinator: Any
) -> None:
    coordinator.gate = Gate(KeyRing([ApiKey(name="a", sha256=digest("pl-a"), max_sequences=1)]))
    app = make_app(coordinator, ChatTemplate("{{ messages[0].content }}"), gate=coordinator.gate)
    headers = {"authorization": "Bearer pl-a"}
    async with (
        asyncio.timeout(HANG),
        httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app), base_url="http://test", headers=headers
        ) as client,
    ):
        first = asyncio.create_task(client.post(path, json=values))
        await waiting.wait()
        second = await client.post(path, json=values)
        assert (second.status_code, second.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        coordinator.found.set()
        assert (await first).status_code == 200
        assert (await client.post(path, json=values)).status_code == 200
        coordinator.found.clear()
        waiting.clear()
        third = asyncio.create_task(client.post(path, json=values))
        await waiting.wait()
        coordinator.found.set()
        assert (await third).status_code == 200, "who waited before is counted no more"
