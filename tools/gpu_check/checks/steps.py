"""Passes launched and recorded: their time over the bandwidth floor, their difference, their peak memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.engine.layout import SequenceInput
from paceline.engine.runner import ModelRunner
from paceline.kv import BlockTable
from tools.gpu_check.checks.machine import bandwidth
from tools.gpu_check.models import Runners, runners_of_cells, tables_of
from tools.gpu_check.report import Failed, Figures
from tools.gpu_check.running import Bench, Case, Check
from tools.gpu_check.sizes import K, Shape

_DIFFERENCE = {torch.bfloat16: 0.2, torch.float32: 1e-3}
"""Relative difference of a recorded row of logits from the launched one's."""


def _cases(bench: Bench, shape: Shape, rows: Sequence[int]) -> Iterator[Case]:
    sizes = bench.sizes
    runners = runners_of_cells(bench.device, sizes, shape)
    for keys, count, height in itertools.product(sizes.keys, sizes.sequences, rows):
        name = f"{shape.name}, {count} x {keys}, {height} row{'s' * (height > 1)}"
        yield name, _Cell(bench, runners, count, keys, height)


@dataclass(frozen=True, slots=True)
class _Cell:
    """One shape of a pass."""

    bench: Bench
    runners: Runners
    count: int
    keys: int
    rows: int

    def __call__(self) -> Figures:
        """Both ways to compute it."""
        runners, device = self.runners, self.bench.device
        tables = tables_of(runners.launched, self.count, self.keys, self.rows)
        try:
            floor = self._floor_seconds()
            expected = self._pass(runners.launched, tables)
            with device.peak_bytes() as peak:
                self._pass(runners.launched, tables)
                launched_peak = peak()
            repeats = max(1, self.bench.sizes.repeats // 4)
            launched = device.seconds(lambda: self._pass(runners.launched, tables), repeats)
            figures: dict[str, Any] = {
                "floor_ms": 1e3 * floor,
                "launched_ms": 1e3 * launched,
                "launched_over_floor": launched / floor,
                "launched_peak_MiB": None if launched_peak is None else launched_peak / 2**20,
                "launched_waits": device.waits(lambda: self._pass(runners.launched, tables)),
            }
            return figures | self._recorded(tables, expected, floor)
        finally:
            for table in tables:
                table.free()

    def _recorded(self, tables: Sequence[BlockTable], expected: torch.Tensor, floor: float) -> Figures:
        runners, device = self.runners, self.bench.device
        recorded = runners.recording(device.new_recorder())
        self._pass(recorded.runner, tables)  # launched: a shape is recorded at its second use
        recording = device.seconds(lambda: self._pass(recorded.runner, tables), 1)
        if not recorded.captured.usable:
            raise Failed("the pass cannot be recorded; the log says why")
        if not recorded.captured.num_recorded:
            return {"recorded": "fits no bucket"}
        with device.peak_bytes() as peak:
            logits = self._pass(recorded.runner, tables)
            recorded_peak = peak()
        seconds = device.seconds(lambda: self._pass(recorded.runner, tables), self.bench.sizes.repeats)
        error = float(((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
        figures = {
            "recorded_ms": 1e3 * seconds,
            "recorded_over_floor": seconds / floor,
            "recorded_peak_MiB": None if recorded_peak is None else recorded_peak / 2**20,
            "recorded_waits": device.waits(lambda: self._pass(recorded.runner, tables)),
            "recording_seconds": recording,
            "same_bits": bool(torch.equal(logits, expected)),
            "same_best": float((logits.argmax(-1) == expected.argmax(-1)).float().mean()),
            "largest_relative_difference": error,
        }
        if not error < _DIFFERENCE[self.bench.sizes.dtype]:
            raise Failed("a recorded pass gives other logits than a launched one", figures)
        return figures

    def _pass(self, runner: ModelRunner, tables: Sequence[BlockTable]) -> torch.Tensor:
        """The logits. Afterwards the tables have their entries of before."""
        tokens = list(range(3, 3 + self.rows))
        logits = runner.forward([SequenceInput(table, tokens, self.rows) for table in tables])
        for table in tables:
            table.truncate_to(self.keys)
        return logits

    def _floor_seconds(self) -> float:
        """Time to read weights, entries, and to write the logits once, at the memory bandwidth."""
        runner = self.runners.launched
        entries = self.count * (self.keys + self.rows) * self.runners.entry_bytes
        logits = self.count * self.rows * runner.vocab_size * runner.dtype.itemsize
        return (runner.backend.weight_bytes + entries + logits) / bandwidth(self.bench.device)


def _of_small(bench: Bench) -> Iterator[Case]:
    return _cases(bench, bench.sizes.small, (1,))


def _of_target(bench: Bench) -> Iterator[Case]:
    return _cases(bench, bench.sizes.target, (1, K + 1))


SMALL = Check("steps of the small model", "decode steps of the 1B shape", _of_small, minutes=1.0)
TARGET = Check(
    "steps of the target", "decode steps and verifications of the 8B shape", _of_target, minutes=2.0
)
