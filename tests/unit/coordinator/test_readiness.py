"""The coordinator's announcement, and its health before and after."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness.links import link_workers

from coordinator import main, serving
from coordinator.app import Coordinator
from coordinator.text.vocabulary import Vocabulary
from coordinator.workers.links import LinkState
from paceline.core.config import CoordinatorConfig
from paceline.core.errors import InternalError
from paceline.rpc.server.server import Server

HANG = 30.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
GRACE = 0.05
"""Seconds."""


@dataclass
class Announcing:
    """A coordinator of one target and one draft of which nothing was heard yet, and its announcement."""

    coordinator: Coordinator
    health: health_pb2_grpc.HealthStub

    def target(self, state: LinkState) -> None:
        """It came or went."""
        (link,) = self.coordinator.dispatcher.workers.targets
        link.state = state
        (self.coordinator._ready if state is LinkState.READY else self.coordinator._lost)(link)

    async def wait_for(self, status: int) -> None:
        """Until health checks are told so."""
        request = health_pb2.HealthCheckRequest(service=serving.SERVICE)
        async with asyncio.timeout(HANG):
            async for answer in self.health.Watch(request):
                if answer.status == status:
                    return


@contextlib.asynccontextmanager
async def announcing(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, grace: float
) -> AsyncIterator[Announcing]:
    """With so many seconds for the draft."""
    monkeypatch.setattr(serving, "DRAFT_GRACE_SECONDS", grace)
    config = CoordinatorConfig(targets=("a:1",), drafts=("b:1",), tokenizer="embedded:target")
    coordinator = Coordinator(config, vocabulary)
    link_workers(coordinator)
    server = Server("coordinator", "127.0.0.1", 0)
    await server.start()
    task = asyncio.create_task(serving.announce(coordinator, server, server.announce))
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield Announcing(coordinator, health_pb2_grpc.HealthStub(channel))
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await server.grpc.stop(None)


async def test_an_unreachable_draft_is_awaited_for_a_grace_period(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with announcing(vocabulary, monkeypatch, GRACE) as about:
        assert capsys.readouterr().out == ""
        about.target(LinkState.READY)
        await about.wait_for(SERVING)
        assert json.loads(capsys.readouterr().out)["event"] == "ready"
        for state, told in ((LinkState.LOST, NOT_SERVING), (LinkState.READY, SERVING)):
            about.target(state)
            await about.wait_for(told)
        assert capsys.readouterr().out == ""


async def test_a_connecting_draft_is_awaited(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Drafts are available for the first request of a started stack."""
    async with announcing(vocabulary, monkeypatch, 10 * HANG) as about:
        (draft,) = about.coordinator.dispatcher.workers.drafts
        about.target(LinkState.READY)
        # Time in which it would have said so, were it not waiting.
        for _ in range(20):
            await about.health.Check(health_pb2.HealthCheckRequest(), timeout=HANG)
        assert capsys.readouterr().out == ""
        draft.settled.set()
        await about.wait_for(SERVING)
        assert json.loads(capsys.readouterr().out)["event"] == "ready"


async def test_a_coordinator_that_fails_to_announce_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:

    async def ready(_coordinator: Coordinator, _seconds: float) -> None:
        return

    def fail(_server: Server, **_: str) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(Coordinator, "wait_until_ready", ready)
    monkeypatch.setattr(Server, "announce", fail)
    monkeypatch.setattr(main, "tune_interpreter", lambda: None)
    config = CoordinatorConfig(targets=("127.0.0.1:1",), tokenizer="embedded:target", port=0, http_port=0)
    async with asyncio.timeout(HANG):
        with pytest.raises(InternalError, match=r"cannot announce readiness: .*no space left"):
            await main._serve(config)
    assert "OSError" in caplog.text
    assert "the links to the workers failed" not in caplog.text
