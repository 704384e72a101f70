"""HTTP calls are counted by route and status, and workers are queried rarely."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import generate_latest

from coordinator.api.http.metrics import Workers, make_registry
from coordinator.sequence.ledger import Commit
from coordinator.telemetry import call_log
from coordinator.workers.links import LinkState
from paceline.core.clock import ManualClock
from paceline.rpc.codec import GenerateCall
from paceline.v1 import common_pb2
from tests.unit.http.api import CHATS, COMPLETIONS, Api, Exchange, script
from tests.unit.http.conftest import hello


async def test_calls_are_counted_by_route_and_status(api: Api, coordinator: Any) -> None:
    await api.ask()
    await api.ask(stream=True)
    await api.ask(prompt=3.5)
    coordinator.script = script(error=ValueError("a defect"))
    await api.ask()
    await api.get("/v1/models/some/model")
    await api.get("/an/address/of/the/clients")
    await api.get(COMPLETIONS)
    await api.request("BREW", "/health")
    assert coordinator.metrics.http_calls == {
        ("POST", "/v1/completions", "200"): 2,
        ("POST", "/v1/completions", "400"): 1,
        ("POST", "/v1/completions", "500"): 1,
        ("GET", "/v1/models/{model:path}", "404"): 1,
        ("GET", "other", "404"): 1,
        ("GET", "/v1/completions", "405"): 1,
        ("other", "/health", "405"): 1,
    }


@pytest.mark.parametrize(
    ("path", "level"), [("/health", "DEBUG"), ("/ping", "DEBUG"), ("/metrics", "DEBUG"), ("/version", "INFO")]
)
async def test_frequent_probes_are_logged_quietly(
    path: str, level: str, api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    await api.get(path)
    ended = [record for record in caplog.records if record.getMessage() == "call ended"]
    assert [record.levelname for record in ended] == [level]


async def test_requests_are_named_by_operation(coordinator: Any, api: Api) -> None:
    """As OpenTelemetry names operations."""
    operations: list[str] = []

    async def noting(call: GenerateCall) -> AsyncIterator[Commit]:
        current = call_log.current.get()
        operations.append(current.operation)
        async for commit in hello(call):
            yield commit

    coordinator.script = noting
    await api.answer(CHATS)
    await api.answer(COMPLETIONS)
    assert operations == ["chat", "text_completion"]


async def test_a_client_that_leaves_early_counts_as_499(exchange: Exchange, coordinator: Any) -> None:
    async def endless(_: GenerateCall) -> AsyncIterator[Commit]:
        exchange.leave.set()
        await asyncio.Event().wait()
        yield

    coordinator.script = endless
    await exchange.begin(coordinator)
    assert exchange.sent == []
    assert coordinator.metrics.http_calls == {("POST", "/v1/completions", "499"): 1}


# ---- workers --------------------------------------------------------------------------------------


class FakeLink:
    """A worker that answers at once, or never, or not well."""

    def __init__(self, role: str = "target", *, answers: bool = True, error: Exception | None = None) -> None:
        self.role, self.address, self.state, self.load = role, f"{role}:1", LinkState.READY, 3
        self.asked = 0
        self.answers, self.error = answers, error
        cache = common_pb2.CacheInfo(total_blocks=8, free_blocks=6)
        self.known = common_pb2.WorkerInfo(model=f"a {role}", cache=cache)

    async def refresh(self) -> None:
        self.asked += 1
        if self.error is not None:
            raise self.error
        if not self.answers:
            await asyncio.Event().wait()


def workers(*links: Any, **more: Any) -> Workers:
    return Workers(lambda: list(links), **more)


async def test_workers_are_queried_at_most_once_a_second() -> None:
    link, clock = FakeLink(), ManualClock()
    queried = workers(link, clock=clock)
    for moment, asked in ((0.0, 1), (0.5, 1), (0.5, 2), (0.1, 2)):
        clock.advance(moment)
        await queried.refresh()
        assert link.asked == asked


async def test_a_hanging_worker_does_not_delay_the_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.api.http.metrics.REFRESH_SECONDS", 0.01)
    hanging, other = FakeLink(answers=False), FakeLink("draft")
    async with asyncio.timeout(60):
        await workers(hanging, other).refresh()
    assert (hanging.asked, other.asked) == (1, 1)


async def test_a_failing_worker_query_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    await workers(FakeLink(error=ValueError("a defect"))).refresh()
    assert "cannot query a worker for its counts: ValueError" in caplog.text


def test_worker_metrics_are_labelled_by_worker(coordinator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.api.http.metrics._CACHE_COUNTERS", {"free_blocks": "text"})
    coordinator.links = (*map(FakeLink, ("target", "draft", "draft", "draft")),)
    coordinator.links[1].state = LinkState.LOST
    coordinator.links[2].address, coordinator.links[2].known.drafter = "draft:2", "ngram"
    coordinator.links[3].address, coordinator.links[3].known = "draft:3", None
    target = 'role="target",worker="target:1",worker_model="a target"'
    coordinator.metrics.worker_lost("draft")
    lines = generate_latest(make_registry(coordinator)).decode().splitlines()
    of = 'model_name="a/model"'
    for line in (
        f'workers{{{of},role="target",state="ready"}} 1.0',
        f'workers{{{of},role="draft",state="ready"}} 2.0',
        f'workers{{{of},role="draft",state="lost"}} 1.0',
        f"kv_cache_usage_perc{{{of},{target}}} 0.25",
        f"kv_cache_blocks{{{of},{target}}} 8.0",
        f"free_blocks_total{{{of},{target}}} 6.0",
        f'worker_sequences{{{of},role="draft",worker="draft:1",worker_model="a draft"}} 3.0',
        f'worker_sequences{{{of},role="draft",worker="draft:2",worker_model="ngram"}} 3.0',
        f'worker_sequences{{{of},role="draft",worker="draft:3",worker_model=""}} 3.0',
        f'failovers_total{{{of},role="draft"}} 1.0',
    ):
        assert f"paceline:{line}" in lines
