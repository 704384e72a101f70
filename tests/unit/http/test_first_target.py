"""A request waits for the first target unless its client leaves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.auth import Gate
from paceline.core.errors import UnavailableError
from paceline.core.security.keys import ApiKey, KeyRing, digest
from tests.unit.http.api import HANG, Api, Exchange, both_paths


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


@both_paths
async def test_a_request_waits_for_the_first_target(
    path: str, waiting: asyncio.Event, coordinator: Any, api: Api
) -> None:
    answering = asyncio.create_task(api.answer(path))
    async with asyncio.timeout(HANG):
        await waiting.wait()
        coordinator.found.set()
        assert (await answering)["model"] == "a/model"


async def test_without_a_target_the_answer_is_503(
    coordinator: Any, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def too_late(_: Any) -> None:
        raise UnavailableError("no target worker is available")

    coordinator.found.clear()
    monkeypatch.setattr(type(coordinator), "wait_for_target", too_late)
    assert (await api.refusal(status=503))["message"] == "no target worker is available"
    assert not coordinator.calls


async def test_a_client_that_leaves_ends_the_wait(
    waiting: asyncio.Event, coordinator: Any, exchange: Exchange
) -> None:
    answering = exchange.begin(coordinator)
    async with asyncio.timeout(HANG):
        await waiting.wait()
        exchange.leave.set()
        await answering
    assert exchange.sent[0]["status"] == 499
    assert not coordinator.calls


@both_paths
async def test_a_keys_limit_covers_waiting_requests(
    path: str, waiting: asyncio.Event, coordinator: Any
) -> None:
    coordinator.gate = Gate(KeyRing([ApiKey(name="a", sha256=digest("pl-a"), max_sequences=1)]))
    headers = {"authorization": "Bearer pl-a"}
    async with asyncio.timeout(HANG), Api(coordinator, gate=coordinator.gate, headers=headers) as api:
        first = asyncio.create_task(api.answer(path))
        await waiting.wait()
        assert (await api.refusal(path, status=429))["code"] == "rate_limit_exceeded"
        coordinator.found.set()
        await first
        await api.answer(path)
        coordinator.found.clear()
        waiting.clear()
        third = asyncio.create_task(api.answer(path))
        await waiting.wait()
        coordinator.found.set()
        await third  # who waited before is counted no more
