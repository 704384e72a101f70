"""Rows, and the report that holds them: one JSON file, one table."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

FORMAT: Final = 1
"""Increased when a field is removed or changes its meaning."""
NO_CARD: Final = "PRETENDED DEVICE: no card has run this. Its times and bytes are those of no GPU."
JSON_NAME: Final = "gpu-check.json"
TABLE_NAME: Final = "gpu-check.txt"

Status = Literal["ok", "failed", "skipped"]
Figures = Mapping[str, Any]
"""Numbers, texts and lists by name; a name ends with its unit."""


class Failed(Exception):  # noqa: N818 - an outcome of a case
    """What was found is not as it must be."""

    def __init__(self, reason: str, figures: Figures | None = None) -> None:
        super().__init__(reason)
        self.figures = {} if figures is None else figures


class Skipped(Exception):  # noqa: N818 - an outcome of a case
    """The case has no meaning here; the reason is reported."""


@dataclass(frozen=True, slots=True)
class Row:
    """The outcome of one case."""

    check: str
    case: str
    status: Status
    seconds: float
    figures: Figures = field(default_factory=dict)
    reason: str = ""
    """Why it failed or was skipped."""


@dataclass(slots=True)
class Report:
    """All rows so far, and what they were measured on."""

    machine: Figures
    pretended: bool
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    finished: bool = False

    @property
    def failed(self) -> int:
        """Number of failed rows."""
        return sum(row.status == "failed" for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "format": FORMAT,
            "note": NO_CARD if self.pretended else "",
            "machine": dict(self.machine),
            "pretended": self.pretended,
            "finished": self.finished,
            "seconds": round(self.seconds, 1),
            "rows": [asdict(row) for row in self.rows],
        }

    def table(self) -> str:
        """One line a row."""
        head = ("check", "case", "status", "seconds", "figures")
        lines = [head, *map(_line, self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(4)]
        told = [
            "  ".join([*(part.ljust(width) for part, width in zip(line[:4], widths, strict=True)), line[4]])
            for line in lines
        ]
        counts = {
            status: sum(row.status == status for row in self.rows) for status in ("ok", "failed", "skipped")
        }
        summary = ", ".join(f"{count} {status}" for status, count in counts.items())
        top = [NO_CARD, ""] if self.pretended else []
        machine = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        end = "" if self.finished else " (not finished)"
        return "\n".join(
            [*top, machine, "", *map(str.rstrip, told), "", f"{summary}; {self.seconds:.0f} s{end}", ""]
        )

    def write(self, folder: Path) -> None:
        """Write both files, each whole at any time."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (
            (JSON_NAME, json.dumps(self.to_dict(), indent=1) + "\n"),
            (TABLE_NAME, self.table()),
        ):
            beside = folder / f".{name}.new"
            beside.write_text(text, encoding="utf-8")
            os.replace(beside, folder / name)  # noqa: PTH105 - replaces in one step on every system


def line_of(row: Row) -> str:
    """A row as it is printed when it is done."""
    return "  ".join(_line(row))


def _line(row: Row) -> Sequence[str]:
    figures = ", ".join(f"{name} {_told(value)}" for name, value in row.figures.items())
    told = ": ".join(part for part in (row.reason.splitlines()[0] if row.reason else "", figures) if part)
    return row.check, row.case, row.status, f"{row.seconds:.1f}", told


def _told(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
