"""A worker's process without a model: it ends with its engine thread, and says that it failed."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import worker_process
from paceline.core.config import TargetConfig
from paceline.core.errors import InternalError
from paceline.worker_process import Role

SECONDS = 30.0


class FakeEngine:
    """Has one step to do as soon as it may, in which it dies."""

    def __init__(self) -> None:
        self.may_work = False
        self.observer: Any = None
        self.holdings: Any = ()

    @property
    def has_work(self) -> bool:
        return self.may_work

    def step(self) -> list[Any]:
        raise ValueError("a defect")

    def patience(self) -> float:
        return 0.0

    def expire(self) -> None:
        pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("early", [True, False], ids=["before it serves", "while it serves"])
async def test_an_engine_thread_that_dies_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    engine = FakeEngine()
    engine.may_work = early
    shells: list[Any] = []
    announced = asyncio.Event()
    device = SimpleNamespace(type="cpu")
    monkeypatch.setattr(
        worker_process, "build", lambda _: SimpleNamespace(runner=SimpleNamespace(device=device))
    )
    monkeypatch.setattr(worker_process, "tune_interpreter", lambda: None)
    monkeypatch.setattr(worker_process.Server, "announce", lambda *_: announced.set())
    role: Any = Role(
        name="target",
        answers="verify",
        service="test.Test",
        make_engine=lambda built, config: engine,
        register=lambda shell, server: shells.append(shell),
        dialect=SimpleNamespace(),
    )
    config = TargetConfig(model="/no/such", port=0)
    serving = asyncio.create_task(worker_process._serve(role, config))
    async with asyncio.timeout(SECONDS):
        if not early:
            await announced.wait()
            assert not serving.done()
            engine.may_work = True
            shells[0].thread.ask(lambda: None)  # it waits for commands
        with contextlib.suppress(InternalError):
            await serving
    assert isinstance(serving.exception(), InternalError)
    assert "engine thread died" in str(serving.exception())
