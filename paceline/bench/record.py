"""One whole run as a value, and as JSON (the format is in docs/benchmarks.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.bench import figures
from paceline.bench.cells import Cells
from paceline.bench.config import BenchConfig
from paceline.bench.figures import RATIOS, Figures, Ratio
from paceline.bench.machine import Machine, Model
from paceline.bench.peers import PeerState
from paceline.client.results import to_plain

FORMAT = 4


@dataclass(frozen=True, slots=True)
class Record:
    """What was measured, on what, and what follows from it."""

    config: BenchConfig
    machine: Machine
    target: Model
    draft: Model
    read_bandwidth: float
    """Bytes per second."""
    prompt_lengths: tuple[int, ...]
    peers: tuple[PeerState, ...]
    cells: Cells
    seconds: float
    """Of the whole run, the start of the processes included."""

    @property
    def floor_seconds(self) -> float:
        """The least time of a target's decode step: all weights, read once."""
        return self.target.weight_bytes / self.read_bandwidth

    def figures(self, temperature: float, k: int | None = None) -> Figures:
        """At one request; of the first K unless told otherwise."""
        k = self.config.k[0] if k is None else k
        return figures.figures(self.cells, self.config, temperature, k, self.floor_seconds)

    def ratios(self, temperature: float) -> Mapping[str, Ratio | None]:
        """All of RATIOS at one temperature."""
        return figures.ratios(self.cells, self.config, temperature, self.figures(temperature))

    def by_k(self, temperature: float, explained: Figures) -> Mapping[str, Ratio | None]:
        """All of BY_K for the K of these figures, at one request."""
        return figures.by_k(self.cells, self.config, temperature, explained)

    @property
    def headline(self) -> dict[str, float | None]:
        """The ratios at the first temperature as numbers."""
        found = self.ratios(self.config.temperature[0])
        return {name: ratio.value if (ratio := found[name]) else None for name in RATIOS}

    @property
    def notes(self) -> list[str]:
        """What a reader must know to read the figures right."""
        notes = []
        if self.target.device != self.draft.device:
            names = f"{self.target.device_name}, {self.draft.device_name}"
            notes.append(f"target and draft have a device each ({names}); peers have the target's")
        elif self.target.device.startswith("cuda"):
            notes.append(f"draft and target share one device ({self.target.device_name}) and its time")
        models = {"draft": self.draft, "target": self.target}
        on_cores = [role for role, model in models.items() if model.device == "cpu"]
        if on_cores:
            notes.append(
                f"{', '.join(on_cores)}, coordinator and client share {self.machine.cores_in_words}; "
                f"{self.config.threads} thread(s) a model"
            )
        notes.append(
            f"the target's weights are {self.target.weight_bytes / 2**20:.1f} MiB; last-level cache "
            f"{self.machine.last_level_cache or 'unknown'}: weights that stay in a cache can be read faster "
            "than the floor says"
        )
        notes += [f"{peer.name}: absent, {peer.absent}" for peer in self.peers if peer.absent]
        return notes

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        temperatures = self.config.temperature
        return {
            "format": FORMAT,
            "ratios": self.headline,
            "ratios_by_temperature": {f"{t:g}": to_plain(self.ratios(t)) for t in temperatures},
            "figures_by_temperature": {f"{t:g}": self.figures(t).to_dict() for t in temperatures},
            "by_k_by_temperature": {f"{t:g}": self._each_k(t) for t in temperatures},
            "cells": [cell.to_dict() for cell in self.cells],
            "peers": [asdict(peer) for peer in self.peers],
            "machine": self.machine.to_dict()
            | {"read_bandwidth": self.read_bandwidth, "read_bandwidth_threads": self.config.threads},
            "models": {"target": self.target.to_dict(), "draft": self.draft.to_dict()},
            "settings": to_plain(self.config) | {"prompt_lengths": list(self.prompt_lengths)},
            "notes": self.notes,
            "seconds": self.seconds,
        }

    def _each_k(self, temperature: float) -> list[dict[str, Any]]:
        return [
            {"ratios": to_plain(self.by_k(temperature, explained)), "figures": explained.to_dict()}
            for explained in (self.figures(temperature, k) for k in self.config.k)
        ]

    def write(self, file: Path) -> None:
        """As JSON. Raises OSError."""
        file.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
