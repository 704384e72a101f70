"""A worker's replica without Serve: its child, how healthy and how loaded that is."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.ending import ended

from paceline.certificates import make_certificates


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Ray, at 127.0.0.1, where this process has a CPU."""
    from paceline.ray import worker

    assigned = SimpleNamespace(get_assigned_resources=lambda: {"CPU": 1.0})
    address = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    monkeypatch.setattr(worker, "ray", SimpleNamespace(util=address, get_runtime_context=lambda: assigned))
    monkeypatch.setattr(worker, "ANSWER_SECONDS", 2.0)


@contextlib.asynccontextmanager
async def draft_worker(**settings: Any) -> AsyncIterator[Any]:
    """A replica; its worker has ended when the block has."""
    from paceline.ray.worker import DraftWorker

    worker = DraftWorker({"model": "embedded:draft", "threads": 1, "num_blocks": 64, **settings})
    try:
        yield worker
    finally:
        await worker.__del__()


async def test_a_replica_knows_how_its_worker_is() -> None:
    async with draft_worker() as worker:
        told = worker.record_replica_metadata()
        assert told["address"].startswith("127.0.0.1:")
        await worker.check_health()
        assert await worker.record_autoscaling_stats() == {"load": 0.0, "cache_use": 0.0}
        os.kill(told["pid"], signal.SIGSTOP)
        with pytest.raises(RuntimeError, match="does not answer"):
            await worker.check_health()
        os.kill(told["pid"], signal.SIGCONT)
        await worker.check_health()
        os.kill(told["pid"], signal.SIGKILL)
        assert ended(told["pid"], 60)
        with pytest.raises(RuntimeError, match="was killed by SIGKILL"):
            await worker.check_health()


async def test_a_worker_with_certificates_is_healthy(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    own = {"tls_certificate": "draft.pem", "tls_key": "draft.key", "tls_ca": "ca.pem"}
    files = {name: str(tmp_path / file) for name, file in own.items()}
    async with draft_worker(**files) as worker:
        await worker.check_health()
        assert await worker.record_autoscaling_stats() == {}
        pid = worker.record_replica_metadata()["pid"]
    assert ended(pid, 60), "it has drained"


def test_a_worker_that_cannot_start_says_why() -> None:
    from paceline.ray.worker import DraftWorker

    with pytest.raises(RuntimeError, match="draft worker: --model: /no/such/folder"):
        DraftWorker({"model": "/no/such/folder"})
