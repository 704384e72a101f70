"""The record of a measurement, as a value and as JSON (format: docs/when-it-helps.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.bench.machine import Machine, MeasuredModel
from paceline.client.results import to_plain
from paceline.measure.config import MeasureConfig
from paceline.measure.figures import ALL_KINDS, DrafterCost, MeasuredRow, Prediction
from paceline.plots import Mark

FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class MeasureRecord:
    """Settings, machine and figures of a run."""

    config: MeasureConfig
    machine: Machine
    target: MeasuredModel
    drafts: tuple[MeasuredModel, ...]
    target_step_seconds: float
    """Median of the target's steps."""
    costs: Mapping[str, DrafterCost]
    """By drafter."""
    rows: tuple[MeasuredRow, ...]
    seconds: float
    """Duration of the run, loading included."""

    @property
    def overall(self) -> list[MeasuredRow]:
        """The rows over all texts."""
        return [row for row in self.rows if row.kind == ALL_KINDS]

    @property
    def marks(self) -> list[Mark]:
        """The rows over all texts, for plots."""
        return [
            Mark(
                f"{_short(row.drafter)}, T = {row.temperature:g}",
                min(row.alpha, 1.0),
                self.costs[row.drafter].c.median,
            )
            for row in self.overall
        ]

    def to_dict(self) -> dict[str, Any]:
        """A dictionary for JSON."""
        return {
            "format": FORMAT,
            "rows": [
                to_plain(row)
                | {"predictions": {mode: _plain(each) for mode, each in row.predictions.items()}}
                for row in self.rows
            ],
            "costs": to_plain(self.costs),
            "target_step_seconds": self.target_step_seconds,
            "models": {"target": to_plain(self.target), "drafts": to_plain(self.drafts)},
            "machine": to_plain(self.machine),
            "settings": to_plain(self.config),
            "seconds": self.seconds,
        }

    def write(self, file: Path) -> None:
        """Write the record as JSON. Raises OSError."""
        file.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")


def _short(name: str) -> str:
    """The last part of a path or hub id."""
    return name.rstrip("/").rpartition("/")[2]


def _plain(prediction: Prediction) -> dict[str, Any]:
    """A plan's fields, with the measured tokens per round in the row of each K."""
    plan = prediction.plan.to_dict()
    rows = [
        {**row, "tokens_per_round_on_texts": tokens}
        for row, tokens in zip(plan["rows"], prediction.tokens_per_round, strict=True)
    ]
    return {**plan, "rows": rows, "speedup_on_texts": prediction.speedup_on_texts}
