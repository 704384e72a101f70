"""Failures while recording: what is refused, what goes on being recorded, and the state of the process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.engine.backends.captured import CudaGraphs, refusals
from paceline.engine.backends.captured.refusals import MORE_FREE
from paceline.engine.backends.captured.static_inputs import StaticInputs
from paceline.engine.backends.ragged_batch import RaggedBatch
from paceline.engine.layout import SequenceInput
from paceline.engine.loading.model import random_model
from paceline.engine.runner import ModelRunner
from tests.cuda.device import CPU, PretendedCuda
from tests.cuda.workers import new_runner
from tests.unit.engine.runners import captured_of
from tests.unit.engine.test_runner import CONFIGS

DEVICE = torch.device("cuda:1")
Reads = Callable[[Tensor], object]
USES = 8
"""Of a bucket before it is tried again."""


@pytest.fixture(autouse=True)
def _early_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "USES_BEFORE_RETRY", USES)


def llama(device: torch.device = DEVICE) -> ModelRunner:
    return new_runner(random_model(CONFIGS["llama"](), seed=1), device)


def step(runner: ModelRunner, sequences: int) -> Tensor:
    """The logits of as many new sequences, of three tokens each, on their device."""
    tables = [runner.new_table() for _ in range(sequences)]
    logits = runner.forward([SequenceInput(t, [2 + i, 3, 4 + i], 3) for i, t in enumerate(tables)])
    for table in tables:
        table.free()
    return logits


def check_answers(runner: ModelRunner, *sequences: int) -> None:
    right = llama(CPU)
    for count in sequences:
        torch.testing.assert_close(step(runner, count).cpu(), step(right, count), atol=1e-3, rtol=1e-3)


def launches(runner: ModelRunner, cuda: PretendedCuda, sequences: int) -> int:
    with cuda.counting() as counts:
        step(runner, sequences)
    return counts.launches


def plant(monkeypatch: pytest.MonkeyPatch, reads: Reads) -> None:
    """Let every recorded step read something of its positions."""
    inner = StaticInputs.batch

    def batch(inputs: StaticInputs, ids: Tensor, positions: Tensor) -> RaggedBatch:
        reads(positions)
        return inner(inputs, ids, positions)

    monkeypatch.setattr(StaticInputs, "batch", batch)


def test_a_step_that_waits_is_refused_before_a_capture(
    cuda: PretendedCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner, begun = llama(), list[Any]()
    recorded = captured_of(runner).num_recorded
    plant(monkeypatch, lambda positions: positions.amax().item())
    monkeypatch.setattr(cuda, "begin_capture", lambda *args: begun.append(args))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            check_answers(runner, 2, 3)
            cuda.captures.check_sound()
    assert not begun
    assert captured_of(runner).num_recorded == recorded
    assert not captured_of(runner).usable
    (told,) = caplog.messages
    assert "called a synchronizing CUDA operation: a number read" in told
    assert launches(runner, cuda, 1) < launches(runner, cuda, 2), "earlier recordings are replayed"


def test_a_model_that_waits_is_loaded_without_recordings(
    cuda: PretendedCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plant(monkeypatch, lambda positions: positions.tolist())
    with caplog.at_level(logging.WARNING):
        runner = llama()
    assert "a recorded one cannot be made" in caplog.text
    assert runner.chain_skills is None
    check_answers(runner, 1, 1, 1)
    cuda.captures.check_sound()


@pytest.mark.parametrize("in_capture", [True, False], ids=["in the capture", "in the trial"])
def test_out_of_memory_concerns_one_bucket_until_memory_is_back(
    cuda: PretendedCuda,
    in_capture: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    free, emptied = [1 << 30], list[int]()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free[0], 1 << 34))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    runner = llama()
    for _ in range(2):
        step(runner, 2)
    recorded = captured_of(runner).num_recorded
    step(runner, 8)
    emptied.clear()
    captures = cuda.captures
    cuda.memory.full = lambda: captures.open is not None if in_capture else captures.elsewhere
    with caplog.at_level(logging.WARNING):
        check_answers(runner, 8)
    cuda.memory.full = lambda: False
    cuda.captures.check_sound()
    assert len(emptied) == 1 + in_capture
    (told,) = caplog.messages
    assert "sequences=8" in told
    assert "ran out of memory" in told
    for _ in range(2 * USES):
        step(runner, 8)
    assert captured_of(runner).num_recorded == recorded, "no more memory is free"
    assert launches(runner, cuda, 2) == 3
    for _ in range(2):
        step(runner, 4)
    assert captured_of(runner).num_recorded == recorded + 1, "other buckets are recorded"
    free[0] += MORE_FREE
    for _ in range(USES):
        step(runner, 8)
    assert captured_of(runner).num_recorded == recorded + 2
    assert captured_of(runner).usable
    assert launches(runner, cuda, 8) == 3
    check_answers(runner, 1, 2, 4, 8)


def test_retries_become_rarer_with_each_failure(cuda: PretendedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where other processes give back and take memory again and again."""
    steps, tried, free = list[int](), list[int](), [1 << 30]

    def full() -> bool:
        if cuda.captures.open is not None:
            tried.append(len(steps))
        return cuda.captures.open is not None

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free[0], 1 << 34))
    runner = llama()
    cuda.memory.full = full
    for number in range(4 + 7 * USES):
        free[0] += MORE_FREE
        steps.append(number)
        step(runner, 2)
    assert tried == [2 + n * USES for n in (0, 1, 3, 7)]


def test_a_capture_that_becomes_invalid_leaves_others_possible(
    cuda: PretendedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the debug mode for waits does not see."""
    runner = llama()
    recorded = captured_of(runner).num_recorded
    with monkeypatch.context() as patched:
        plant(patched, lambda _: torch.cuda.synchronize())
        for _ in range(3):
            check_answers(runner, 2)
            cuda.captures.check_sound()
    assert captured_of(runner).num_recorded == recorded
    check_answers(runner, 3, 3, 3)
    assert captured_of(runner).num_recorded == recorded + 1


def fails_once(error: Exception, *, waits: bool) -> Callable[[], Tensor]:
    """A step that fails at its second run: in the capture."""
    ran: list[int] = []

    def step() -> Tensor:
        ran.append(1)
        if len(ran) == 2:
            if waits:
                torch.cuda.synchronize()
            raise error
        return torch.ones(1, device=DEVICE)

    return step


@pytest.mark.parametrize("waits", [False, True], ids=["valid", "invalid"])
def test_a_failed_capture_leaves_nothing_behind(cuda: PretendedCuda, waits: bool) -> None:
    graphs = CudaGraphs(DEVICE)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            graphs(fails_once(torch.OutOfMemoryError("CUDA out of memory."), waits=waits))
        cuda.captures.check_sound()
    assert graphs(lambda: torch.ones(1, device=DEVICE))().tolist() == [1.0]


@pytest.mark.planted
def test_a_capture_left_open_is_seen(cuda: PretendedCuda) -> None:
    """Planted: a recorder that does not end the captures that fail."""
    graphs = CudaGraphs(DEVICE)
    graphs._abandon = lambda graph: None  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="planted"):
        graphs(fails_once(ValueError("planted"), waits=False))
    with pytest.raises(AssertionError, match="a capture is open"):
        cuda.captures.check_sound()


@pytest.mark.planted
def test_a_capture_stream_left_current_is_seen(cuda: PretendedCuda) -> None:
    """Planted: what `torch.cuda.graph` does, which ends the capture before it leaves the stream."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_stream(torch.cuda.Stream(DEVICE))  # type: ignore[no-untyped-call]
    graph.capture_begin(torch.cuda.graph_pool_handle())
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="previous error during capture"):
        graph.capture_end()
    with pytest.raises(AssertionError, match="believes that a capture continues"):
        cuda.captures.check_sound()
    cuda.captures.end_allocate_to_pool(0, (0, 1))
    with pytest.raises(AssertionError, match="the capture stream is current"):
        cuda.captures.check_sound()
