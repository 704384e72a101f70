"""Faults while a pass is recorded, each in a process of its own: what is left of the worker?"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, Final

from torch import Tensor

from paceline.engine.backends.captured import Recorder
from paceline.engine.layout import SequenceInput
from paceline.engine.runner import ModelRunner
from tools.gpu_check import children
from tools.gpu_check.device import Device
from tools.gpu_check.models import new_model, runners_of
from tools.gpu_check.report import Failed, Figures
from tools.gpu_check.running import Bench, Case, Check
from tools.gpu_check.sizes import Sizes

_ENTRIES: Final = 1024


def _cases(bench: Bench) -> Iterator[Case]:
    for name in FAULTS:
        yield name, lambda name=name: _asked(bench, name)


def _asked(bench: Bench, name: str) -> Figures:
    with children.started(bench.device, "fault", name) as child:
        figures: dict[str, Any] = json.loads(child.last_line(seconds=60.0 * CHECK.minutes))
    if figures.get("error"):
        raise Failed(f"the worker is lost: {figures['error']}", figures)
    if not figures["recorded_afterwards"]:
        raise Failed("nothing is recorded any more after the fault", figures)
    return figures


def _exhausted(device: Device) -> Recorder:
    """Leaves no memory to the recording, but enough to the trial before it."""
    inner = device.new_recorder()

    def record(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        calls = itertools.count()

        def starved() -> Tensor:
            with device.exhausted() if next(calls) else contextlib.nullcontext():
                return step()

        return inner(starved)

    return record


def _waiting(device: Device) -> Recorder:
    """Reads a number in the middle of the recording, as a model's own code may."""
    inner = device.new_recorder()

    def record(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def reads() -> Tensor:
            result = step()
            result.float().amax().item()
            return result

        return inner(reads)

    return record


FAULTS: Final[dict[str, Callable[[Device], Recorder]]] = {
    "out of memory": _exhausted,
    "a number read": _waiting,
}


def cause(device: Device, sizes: Sizes, name: str) -> Figures:
    """Let a recording fail, then ask for the same pass again: by the same runner, and in another shape."""
    runners = runners_of(device, new_model(device, sizes.small, sizes.dtype), _ENTRIES)
    recorder = _OnceFailing(FAULTS[name](device), device.new_recorder())
    recorded = runners.recording(recorder)
    wanted = _logits(runners.launched, 1)
    figures: dict[str, Any] = {"recorded_afterwards": 0, "largest_difference": None, "error": ""}
    try:
        for _ in range(4):  # launched, recorded in vain, and again
            found = _logits(recorded.runner, 1)
        figures["failed_recordings"] = recorder.failures
        for count in (2, 2, 2):
            _logits(recorded.runner, count)
        figures["recorded_afterwards"] = recorded.captured.num_recorded
        figures["largest_difference"] = float((found - wanted).abs().max())
    except Exception as error:
        figures["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return figures


class _OnceFailing:
    """The first recording is made by another recorder."""

    def __init__(self, first: Recorder, then: Recorder) -> None:
        self._first, self._then = first, then
        self._calls = 0
        self.failures = 0

    def __call__(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self._calls += 1
        if self._calls > 1:
            return self._then(step)
        try:
            return self._first(step)
        except Exception:
            self.failures += 1
            raise


def _logits(runner: ModelRunner, count: int) -> Tensor:
    tables = [runner.new_table() for _ in range(count)]
    logits = runner.forward([SequenceInput(table, [3, 4, 5], 3) for table in tables])
    for table in tables:
        table.free()
    return logits.cpu()


CHECK = Check("faults", "out of memory and a wait while a pass is recorded", _cases, minutes=1.0)
