"""A worker's process without a model: how it ends when its engine thread has died, or never will."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import worker_process
from paceline.core.config import TargetConfig
from paceline.core.errors import InternalError
from paceline.rpc.server import FAREWELL_SECONDS
from paceline.supervisor.children import STOP_TIMEOUT
from paceline.worker_process import Role

SECONDS = 30.0


class FakeEngine:
    """Has one step to do as soon as it may, in which it dies, or is stuck until it is let go."""

    def __init__(self) -> None:
        self.may_work = False
        self.dies = True
        self.stuck, self.let_go = threading.Event(), threading.Event()
        self.observer: Any = None
        self.holdings: Any = ()

    @property
    def has_work(self) -> bool:
        return self.may_work

    def step(self) -> list[Any]:
        if self.dies:
            raise ValueError("a defect")
        self.may_work = False
        self.stuck.set()
        self.let_go.wait(SECONDS)
        return []

    def patience(self) -> float:
        return 0.0

    def expire(self) -> None:
        pass


class Worker:
    """A worker that is served in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = FakeEngine()
        self.shell: Any = None
        self.server: Any = None
        self.announced = asyncio.Event()

        def announce(server: Any) -> None:
            self.server = server
            self.announced.set()

        device = SimpleNamespace(type="cpu")
        built = SimpleNamespace(runner=SimpleNamespace(device=device))
        monkeypatch.setattr(worker_process, "build", lambda _: built)
        monkeypatch.setattr(worker_process, "tune_interpreter", lambda: None)
        monkeypatch.setattr(worker_process.Server, "announce", announce)

    def work(self) -> None:
        """Let the engine do its step."""
        self.engine.may_work = True
        self.shell.thread.ask(lambda: None)  # it waits for commands

    def serve(self) -> asyncio.Task[None]:
        role: Any = Role(
            name="target",
            answers="verify",
            service="test.Test",
            make_engine=lambda *_: self.engine,
            register=lambda shell, server: setattr(self, "shell", shell),
            dialect=SimpleNamespace(),
        )
        config = TargetConfig(model="/no/such", port=0)
        return asyncio.create_task(worker_process._serve(role, config))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("early", [True, False], ids=["before it serves", "while it serves"])
async def test_an_engine_thread_that_dies_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    worker = Worker(monkeypatch)
    worker.engine.may_work = early
    serving = worker.serve()
    async with asyncio.timeout(SECONDS):
        if not early:
            await worker.announced.wait()
            assert not serving.done()
            worker.work()
        with contextlib.suppress(InternalError):
            await serving
    assert isinstance(serving.exception(), InternalError)
    assert "engine thread died" in str(serving.exception())


async def test_an_engine_thread_that_is_stuck_does_not_keep_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once: it was waited for for ever, and who had lost its supervisor kept the device's memory."""

    class Left(Exception):  # noqa: N818 - no error, an end
        """With which code, and whether logs were written by then."""

    flushed: list[bool] = []

    def leave(code: int) -> None:
        raise Left(code, bool(flushed))

    monkeypatch.setattr(logging, "shutdown", lambda: flushed.append(True))
    monkeypatch.setattr(os, "_exit", leave)
    assert worker_process._STOP_SECONDS + FAREWELL_SECONDS < STOP_TIMEOUT
    monkeypatch.setattr(worker_process, "_STOP_SECONDS", 0.05)
    worker = Worker(monkeypatch)
    worker.engine.dies = False
    serving = worker.serve()
    try:
        async with asyncio.timeout(SECONDS):
            await worker.announced.wait()
            worker.work()
            assert await asyncio.to_thread(worker.engine.stuck.wait, SECONDS)
            worker.server.request_stop()
            with pytest.raises(Left) as left:
                await serving
    finally:
        worker.engine.let_go.set()
    assert left.value.args == (1, True)
    assert "the engine thread does not end" in caplog.text
