"""The record of a run, as a value and as JSON (format: docs/benchmarks.md)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.cells import Cells
from paceline.bench.config import BenchConfig
from paceline.bench.figures import Service, SpeculationFigures, service, speculation
from paceline.bench.machine import Machine, MeasuredModel
from paceline.client.results import to_plain

FORMAT = 5


@dataclass(frozen=True, slots=True)
class BenchRecord:
    """Settings, machine and measurements of a run."""

    config: BenchConfig
    machine: Machine
    target: MeasuredModel
    draft: MeasuredModel
    read_bandwidth: float
    """Bytes per second."""
    prompt_lengths: tuple[int, ...]
    cells: Cells
    seconds: float
    """Duration of the whole run, including the start of the processes."""

    def speculation(self, temperature: float) -> list[SpeculationFigures]:
        """One entry for each K; empty if concurrency 1 was not measured."""
        ks = self.config.k if 1 in self.config.concurrency else ()
        # Lower bound of a target's decode step: reading all weights once.
        floor = self.target.weight_bytes / self.read_bandwidth
        return [speculation(self.cells, temperature, k, floor) for k in ks]

    def service(self, temperature: float) -> list[Service]:
        """One entry for each concurrency."""
        return [service(self.cells, self.config, temperature, n) for n in self.config.concurrency]

    @property
    def notes(self) -> list[str]:
        """Remarks needed to interpret the figures."""
        notes = []
        if self.target.device != self.draft.device:
            names = f"{self.target.device_name}, {self.draft.device_name}"
            notes.append(f"target and draft have separate devices ({names}); peers use the target's")
        elif self.target.device.startswith("cuda"):
            notes.append(f"draft and target share one device ({self.target.device_name})")
        models = {"draft": self.draft, "target": self.target}
        on_cores = [role for role, model in models.items() if model.device == "cpu"]
        if on_cores:
            notes.append(
                f"{', '.join(on_cores)}, coordinator and client share {self.machine.cores_in_words}; "
                f"{self.config.threads} thread(s) per model"
            )
        return notes

    def to_dict(self) -> dict[str, Any]:
        """A dictionary for JSON."""
        temperatures = self.config.temperature
        return {
            "format": FORMAT,
            "speculation": to_plain([each for t in temperatures for each in self.speculation(t)]),
            "service": to_plain([each for t in temperatures for each in self.service(t)]),
            "cells": [cell.to_dict() for cell in self.cells.values()],
            "machine": to_plain(self.machine)
            | {"read_bandwidth": self.read_bandwidth, "read_bandwidth_threads": self.config.threads},
            "models": {"target": to_plain(self.target), "draft": to_plain(self.draft)},
            "settings": to_plain(self.config) | {"prompt_lengths": list(self.prompt_lengths)},
            "notes": self.notes,
            "seconds": self.seconds,
        }

    def write(self, file: Path) -> None:
        """Write the record as JSON. Raises OSError."""
        file.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
