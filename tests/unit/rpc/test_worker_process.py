"""A worker process without a model: its end with a dead or stuck engine thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import worker_process
from paceline.core.clock import ManualClock
from paceline.core.config import DraftConfig, TargetConfig
from paceline.core.errors import InternalError
from paceline.core.messages import CloseSequence, OpenSequence
from paceline.core.types import AcceptanceMode, SamplingParams, SequenceParams
from paceline.engine.scheduling.sequences import HeldSequences
from paceline.engine.state.paged import PagedStates
from paceline.kv import BlockPool
from paceline.kv.prefix import PrefixIndex
from paceline.rpc.server.server import FAREWELL_SECONDS
from paceline.rpc.streams import worker_stream
from paceline.supervisor.children import STOP_TIMEOUT
from paceline.worker_process import Role, WorkerShell

SECONDS = 30.0


class FakeEngine:
    """Has one step to do as soon as it may, in which it dies, or is stuck until it is let go."""

    def __init__(self) -> None:
        self.may_work = False
        self.dies = True
        self.stuck, self.let_go = threading.Event(), threading.Event()
        self.observer: Any = None
        self.grammars = None
        self.sequences: Any = ()

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

    def batching_delay(self) -> float:
        return 0.0

    def reset_cancel(self) -> None:
        pass

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
        self.built = SimpleNamespace(device=device)
        monkeypatch.setattr(worker_process, "tune_interpreter", lambda: None)
        monkeypatch.setattr(worker_process.Server, "announce", announce)
        self.role: Any = Role(
            name="target",
            answers="verify",
            service="test.Test",
            load=lambda _: self.built,
            make_engine=lambda *_: self.engine,
            register=lambda shell, server: setattr(self, "shell", shell),
            frame_codec=SimpleNamespace(),
        )

    def work(self) -> None:
        """Let the engine do its step."""
        self.engine.may_work = True
        self.shell.thread.ask(lambda: None)  # it waits for commands

    def serve(self) -> asyncio.Task[None]:
        config = TargetConfig(model="/no/such", port=0)
        return asyncio.create_task(worker_process._serve(self.role, config))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("early", [True, False], ids=["before it serves", "while it serves"])
async def test_a_dead_engine_thread_ends_the_process(monkeypatch: pytest.MonkeyPatch, early: bool) -> None:
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


class Left(Exception):  # noqa: N818 - no error, an end
    """With which code."""


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would end this process raises Left."""

    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(os, "_exit", leave)


@pytest.mark.usefixtures("exits")
async def test_a_stuck_engine_thread_does_not_keep_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would keep the device's memory."""
    flushed: list[bool] = []
    monkeypatch.setattr(logging, "shutdown", lambda: flushed.append(True))
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
    assert (left.value.args, flushed) == ((1,), [True])
    assert "the engine thread does not end" in caplog.text


@pytest.mark.usefixtures("exits")
@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("I/O operation on closed file")])
def test_unread_streams_do_not_keep_the_process(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing raises BrokenPipeError without a supervisor."""

    def flush() -> None:
        raise error

    monkeypatch.setattr(logging, "shutdown", lambda: None)
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, SimpleNamespace(flush=flush, write=len))
    with pytest.raises(Left) as left:
        worker_process._leave_the_engine()
    assert left.value.args == (1,)


def test_metrics_on_an_ipv6_host_have_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts: list[str] = []
    monkeypatch.setattr(
        "paceline.telemetry.worker_metrics.MetricsServer", lambda _collector, host, _port: hosts.append(host)
    )
    worker = Worker(monkeypatch)
    worker.built.pool = None
    WorkerShell(worker.role, TargetConfig(model="/no/such", host="::1", metrics_port=0)).serve_metrics()
    assert hosts == ["[::1]"]


@pytest.mark.parametrize(("drafter", "shown"), [("model", "a/draft"), ("ngram", "ngram")])
def test_metrics_name_the_model_or_the_drafter(
    drafter: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[str] = []
    monkeypatch.setattr(
        "paceline.telemetry.worker_metrics.WorkerCollector", lambda _role, model, *_: models.append(model)
    )
    monkeypatch.setattr("paceline.telemetry.worker_metrics.MetricsServer", lambda *_: None)
    worker = Worker(monkeypatch)
    worker.built.pool = None
    config: Any = DraftConfig(model="a/draft", drafter=drafter, metrics_port=0)
    WorkerShell(worker.role, config).serve_metrics()
    assert models == [shown]


async def test_the_cache_is_checked_only_while_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of many blocks delays sequences by a tenth of a second."""
    checks: list[str] = []
    monkeypatch.setattr(BlockPool, "check_integrity", lambda _: checks.append("pool"))
    monkeypatch.setattr(PrefixIndex, "check_integrity", lambda _: checks.append("index"))
    pool, clock = BlockPool(100_000, 1), ManualClock()
    worker = Worker(monkeypatch)
    monkeypatch.setattr(worker_process, "monotonic", clock)
    worker.built.pool = pool
    shell: Any = WorkerShell(worker.role, TargetConfig(model="/no/such"))
    sequences: HeldSequences[Any] = HeldSequences(PagedStates(pool, prefix_cache=True), 4, clock, 600.0)
    shell._engine.sequences = sequences
    params = SequenceParams(SamplingParams(seed=1), AcceptanceMode.COUPLED, 2)
    sequences.open(OpenSequence("a", 1, (1, 2), params))
    assert (shell._cache_info().sequences, checks) == (1, [])
    sequences.close(CloseSequence("a", 1))
    assert (shell._cache_info().sequences, checks) == (0, ["pool", "index"])


async def test_the_cache_is_checked_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any client's GetStatus would have the engine check all blocks."""
    clock, checks = ManualClock(), []
    worker = Worker(monkeypatch)
    monkeypatch.setattr(worker_process, "monotonic", clock)
    pool = worker.built.pool = BlockPool(4, 8)
    monkeypatch.setattr(pool, "check_integrity", lambda: checks.append(clock.now))
    shell: Any = WorkerShell(worker.role, TargetConfig(model="/no/such"))
    shell._engine.sequences = HeldSequences(PagedStates(BlockPool(1, 1), prefix_cache=False), 4, clock, 600.0)
    for moment, times in ((0.0, 1), (0.9, 1), (0.1, 2), (0.5, 2)):
        clock.advance(moment)
        pool.allocate()
        free = pool.free_blocks
        assert (shell._cache_info().free_blocks, len(checks)) == (free, times), "the numbers are those of now"


async def test_a_stuck_engine_is_not_ready_until_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change is reported once."""
    monkeypatch.setattr(worker_stream, "WATCH_SECONDS", 0)
    stuck, told, looked = worker_stream.MAX_IDLE_SECONDS + 1, [], asyncio.Event()
    seconds = [0.0, stuck, stuck, 0.0, 0.0]

    class Engine:
        @property
        def seconds_since_progress(self) -> float:
            if len(seconds) == 1:
                looked.set()  # all was seen, and what came of it was told
                return seconds[0]
            return seconds.pop(0)

    async def set_serving(serving: bool) -> None:
        told.append(serving)

    watching = asyncio.create_task(worker_stream.watch_progress(Engine(), set_serving))
    async with asyncio.timeout(SECONDS):
        await looked.wait()
    watching.cancel()
    await asyncio.wait([watching])
    assert told == [False, True]
