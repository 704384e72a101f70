"""HTTP calls are counted by route and status, and workers are queried rarely."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from prometheus_client import generate_latest

from coordinator.api.chat_template import ChatTemplate
from coordinator.api.http.app import make_app
from coordinator.api.http.metrics import Workers, make_registry
from coordinator.sequence.ledger import Commit
from coordinator.telemetry import call_log
from coordinator.workers.links import LinkState
from paceline.core.clock import ManualClock
from paceline.rpc.codec import GenerateCall
from paceline.v1 import common_pb2
from tests.unit.http.conftest import hello

BODY = {"prompt": "x", "max_tokens": 2}


async def test_calls_are_counted_by_route_and_status(client: httpx2.AsyncClient, coordinator: Any) -> None:
    await client.post("/v1/completions", json=BODY)
    await client.post("/v1/completions", json=BODY | {"stream": True})
    await client.post("/v1/completions", json={"prompt": 3.5})
    await client.get("/v1/models/some/model")
    await client.get("/an/address/of/the/clients")
    await client.get("/v1/completions")
    await client.request("BREW", "/health")
    assert coordinator.metrics.http_calls == {
        ("POST", "/v1/completions", "200"): 2,
        ("POST", "/v1/completions", "400"): 1,
        ("GET", "/v1/models/{model:path}", "404"): 1,
        ("GET", "other", "404"): 1,
        ("GET", "/v1/completions", "405"): 1,
        ("other", "/health", "405"): 1,
    }


@pytest.mark.parametrize(
    ("path", "level"), [("/health", "DEBUG"), ("/ping", "DEBUG"), ("/metrics", "DEBUG"), ("/version", "INFO")]
)
async def test_frequent_probes_are_logged_quietly(
    path: str, level: str, client: httpx2.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    await client.get(path)
    ended = [record for record in caplog.records if record.getMessage() == "call ended"]
    assert [record.levelname for record in ended] == [level]


async def test_requests_are_named_by_operation(
    coordinator: Any, make_client: Callable[..., httpx2.AsyncClient]
) -> None:
    """As OpenTelemetry names operations."""
    operations: list[str] = []

    async def noting(call: GenerateCall) -> AsyncIterator[Commit]:
        current = call_log.current.get()
        assert current is not None
        operations.append(current.operation)
        async for commit in hello(call):
            yield commit

    coordinator.script = noting
    async with make_client(coordinator, ChatTemplate("{{ messages[0].content }}")) as client:
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
    assert operations == ["chat", "text_completion"]


async def test_an_unexpected_error_counts_as_500(client: httpx2.AsyncClient, coordinator: Any) -> None:
    async def broken(_call: Any) -> AsyncIterator[Commit]:
        raise ValueError("a defect")
        yield

    coordinator.script = broken
    assert (await client.post("/v1/completions", json=BODY)).status_code == 500
    assert coordinator.metrics.http_calls == {("POST", "/v1/completions", "500"): 1}


async def test_a_client_that_leaves_early_counts_as_499(exchange: Any, coordinator: Any) -> None:
    async def endless(_call: Any) -> AsyncIterator[Commit]:
        exchange.leave.set()
        await asyncio.Event().wait()
        yield

    coordinator.script = endless
    body = [{"type": "http.request", "body": b'{"prompt": "x"}', "more_body": False}]

    async def receive() -> Any:
        return body.pop() if body else await exchange.receive()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [],
        "http_version": "1.1",
        "scheme": "http",
    }
    await make_app(coordinator, None)(scope, receive, exchange.send)
    assert exchange.sent == []
    assert coordinator.metrics.http_calls == {("POST", "/v1/completions", "499"): 1}


# ---- workers --------------------------------------------------------------------------------------


class FakeLink:
    """A worker that answers at once, or never."""

    def __init__(self, role: str = "target", *, answers: bool = True) -> None:
        self.role, self.address, self.state, self.load = role, f"{role}:1", LinkState.READY, 3
        self.asked = 0
        self.answers = answers
        cache = common_pb2.CacheInfo(total_blocks=8, free_blocks=6)
        self.known = common_pb2.WorkerInfo(cache=cache)

    async def refresh(self) -> None:
        self.asked += 1
        if not self.answers:
            await asyncio.Event().wait()


async def test_workers_are_queried_at_most_once_a_second() -> None:
    link, clock = FakeLink(), ManualClock()
    workers = Workers(lambda: [link], clock)  # type: ignore[list-item]
    for moment, asked in ((0.0, 1), (0.5, 1), (0.5, 2), (0.1, 2)):
        clock.advance(moment)
        await workers.refresh()
        assert link.asked == asked


async def test_a_hanging_worker_does_not_delay_the_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.api.http.metrics.REFRESH_SECONDS", 0.01)
    hanging, other = FakeLink(answers=False), FakeLink("draft")
    async with asyncio.timeout(60):
        await Workers(lambda: [hanging, other]).refresh()  # type: ignore[list-item]
    assert (hanging.asked, other.asked) == (1, 1)


async def test_a_failing_worker_query_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeLink):
        async def refresh(self) -> None:
            raise ValueError("a defect")

    await Workers(lambda: [Broken()]).refresh()  # type: ignore[list-item]
    assert "cannot query a worker for its counts: ValueError" in caplog.text


def test_worker_metrics_are_labelled_by_role(coordinator: Any) -> None:
    coordinator.links = (FakeLink("target"), FakeLink("draft"))
    coordinator.links[1].state = LinkState.LOST
    coordinator.metrics.worker_lost("draft")
    lines = generate_latest(make_registry(coordinator)).decode().splitlines()
    of = 'model_name="a/model"'
    assert f'paceline:workers{{{of},role="target",state="ready"}} 1.0' in lines
    assert f'paceline:workers{{{of},role="draft",state="ready"}} 0.0' in lines
    assert f'paceline:workers{{{of},role="draft",state="lost"}} 1.0' in lines
    assert f'paceline:kv_cache_usage_perc{{{of},role="target",worker="target:1"}} 0.25' in lines
    assert f'paceline:kv_cache_blocks{{{of},role="target",worker="target:1"}} 8.0' in lines
    assert f'paceline:worker_sequences{{{of},role="draft",worker="draft:1"}} 3.0' in lines
    assert f'paceline:failovers_total{{{of},role="draft"}} 1.0' in lines


def test_cache_counters_are_exported(coordinator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = {"free_blocks": "text"}
    monkeypatch.setattr("coordinator.api.http.metrics._CACHE_COUNTERS", counters)
    coordinator.links = (SimpleNamespace(**vars(FakeLink())),)
    text = generate_latest(make_registry(coordinator)).decode()
    expected = 'paceline:free_blocks_total{model_name="a/model",role="target",worker="target:1"} 6.0'
    assert expected in text.splitlines()
