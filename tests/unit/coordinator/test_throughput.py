"""The throughput log line."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.telemetry.metrics import Metrics
from coordinator.telemetry.throughput import Throughput, tell_throughput
from paceline.v1 import common_pb2


class Worker:
    """A link to a worker that says how full its cache is, or never answers."""

    def __init__(self, role: str, free: int | None, *, ready: bool = True) -> None:
        self.role, self.ready, self._free = role, ready, free

    async def refresh(self) -> Any:
        if self._free is None:
            await asyncio.Event().wait()
        return common_pb2.WorkerInfo(cache=common_pb2.CacheInfo(total_blocks=8, free_blocks=self._free))


def coordinator(*links: Any) -> Any:
    return SimpleNamespace(
        metrics=Metrics(), dispatcher=SimpleNamespace(running=0, waiting=0), links=list(links)
    )


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    found = [record for record in caplog.records if record.getMessage() == "throughput"]
    return [record.fields for record in found]  # type: ignore[attr-defined]


def count(metrics: Metrics, prompt: int, generated: int, drafts: int = 0, accepted: int = 0) -> None:
    """`drafts` proposals of 4 tokens, of each of which `accepted` were; other rounds have none."""
    metrics.prompt_tokens += prompt
    metrics.generation_tokens += generated
    plain = generated - drafts * (1 + accepted)
    metrics.rounds += plain + drafts
    metrics.rounds_by_draft[0] += plain
    metrics.rounds_by_draft[4] += drafts
    metrics.accepted_lengths[accepted] += drafts


async def test_a_line_has_the_rates_since_the_previous(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    of = coordinator(Worker("target", 6), Worker("target", 2), Worker("draft", 8))
    count(of.metrics, 1000, 1000, 10, 0)
    throughput = Throughput(of, 5.0)
    of.dispatcher.running, of.dispatcher.waiting = 3, 2
    count(of.metrics, 40, 300, drafts=10, accepted=3)
    await throughput.write(15.0)
    assert lines(caplog) == [
        {
            "running": 3,
            "waiting": 2,
            "prompt_tokens_per_s": 4.0,
            "generation_tokens_per_s": 30.0,
            "acceptance_rate": 0.75,
            "mean_acceptance_length": 4.0,
            "target_cache_usage": 0.75,
            "draft_cache_usage": 0.0,
        }
    ]


async def test_mean_acceptance_length_is_of_committed_tokens(caplog: pytest.LogCaptureFixture) -> None:
    """A sequence that ends with an accepted token has no correction or bonus."""
    caplog.set_level("INFO")
    of = coordinator()
    throughput = Throughput(of, 0.0)
    count(of.metrics, 1, 4, drafts=1, accepted=3)
    of.metrics.generation_tokens -= 1
    await throughput.write(10.0)
    (line,) = lines(caplog)
    assert (line["acceptance_rate"], line["mean_acceptance_length"]) == (0.75, 3.0)


async def test_an_idle_coordinator_writes_no_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    of = coordinator()
    throughput = Throughput(of, 0.0)
    await throughput.write(10.0)
    assert lines(caplog) == []
    count(of.metrics, 1, 1)
    await throughput.write(20.0)
    await throughput.write(30.0)
    assert [line["running"] for line in lines(caplog)] == [0]
    of.dispatcher.waiting = 1
    await throughput.write(40.0)
    assert len(lines(caplog)) == 2


async def test_without_proposals_no_acceptance_is_written(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    of = coordinator()
    throughput = Throughput(of, 0.0)
    count(of.metrics, 1, 1)
    await throughput.write(10.0)
    assert not [name for name in lines(caplog)[0] if "acceptance" in name or "cache" in name]


async def test_a_silent_worker_is_left_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("coordinator.telemetry.throughput.ANSWER_SECONDS", 0.01)
    of = coordinator(Worker("target", None), Worker("draft", 4), Worker("target", 0, ready=False))
    throughput = Throughput(of, 0.0)
    count(of.metrics, 1, 1)
    await throughput.write(10.0)
    assert {name for name in lines(caplog)[0] if "cache" in name} == {"draft_cache_usage"}


async def test_an_interval_of_zero_writes_nothing() -> None:
    async with asyncio.timeout(60):
        await tell_throughput(coordinator(), 0.0)


async def test_a_failed_line_is_logged_and_the_next_is_written(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[float] = []
    again = asyncio.Event()

    async def write(_: Throughput, now: float) -> None:
        tries.append(now)
        if len(tries) > 1:
            again.set()
        raise ValueError("a defect")

    monkeypatch.setattr(Throughput, "write", write)
    telling = asyncio.create_task(tell_throughput(coordinator(), 0.001))
    async with asyncio.timeout(60):
        await again.wait()
    telling.cancel()
    assert "cannot report the throughput" in caplog.text
