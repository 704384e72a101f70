"""A run as pictures: rates over concurrency, ratios at one request, and where a round's time goes."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.bench import arms
from paceline.bench.arms import Arm
from paceline.bench.cells import PARTS, Cell, Spread, decode_ratio, ratio
from paceline.bench.figures import base_of
from paceline.bench.record import Record
from paceline.core.errors import FailedPreconditionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 150
_PART_COLOURS = ("#4c72b0", "#dd8452", "#8c8c8c", "#c44e52", "#8172b3")
_OURS, _THEIRS, _BASE = "#4c72b0", "#8f8f8f", "#333333"
_RATES = "medians and quartiles"
_NAME_WIDTH = 34
"""Characters of a line of an arm's name."""
_CHARACTER, _LINE = 0.068, 0.17
"""Inches of a character and of a line, at 8 points."""
_CAPTION_CHARACTER = 0.056
"""Inches of a character at 7 points."""


def require_matplotlib() -> None:
    """Raise FailedPreconditionError, with what to install, unless plots can be drawn."""
    if find_spec("matplotlib") is None:
        raise FailedPreconditionError("plots need matplotlib: install paceline with its extra `bench`")


def write_plots(record: Record, folder: Path) -> list[Path]:
    """Write the PNG files and return them; a plot without data is left out. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Figure] = {}
    if record.config.measures_load:
        figures["throughput.png"] = throughput(record)
    if 1 in record.config.concurrency:
        figures["ratios.png"] = one_request(record)
        figures["rounds.png"] = rounds(record)
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=_DPI)
    return [folder / name for name in figures]


def _wrapped(name: str) -> str:
    return textwrap.fill(name, _NAME_WIDTH)


def _panels(record: Record, names: Sequence[str], height: float, says: str) -> tuple[Figure, list[Axes]]:
    """A figure with one panel a temperature, side by side; the first shows the names of all rows.

    `height` is that of what is not rows, in inches.
    """
    from matplotlib.figure import Figure

    temperatures = record.config.temperature
    lines = [_wrapped(name).splitlines() for name in names]
    longest = max(len(line) for each in lines for line in each)
    width = 0.4 + _CHARACTER * longest + 3.4 * len(temperatures)
    height += len(names) * max(0.3, 0.1 + _LINE * max(map(len, lines)))
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(1, len(temperatures), squeeze=False, sharex=True, sharey=True)[0]
    for panel, t in zip(panels, temperatures, strict=True):
        panel.set_title(f"temperature {t:g}", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(y=0.02)
    _caption_below(figure, f"{_caption(record)}; {says}")
    return figure, list(panels)


def _caption_below(figure: Figure, text: str) -> None:
    characters = int(figure.get_figwidth() / _CAPTION_CHARACTER)
    figure.supxlabel(textwrap.fill(text, characters), fontsize=7, color="#666666")


def _caption(record: Record) -> str:
    where = " and ".join(dict.fromkeys(model.device_name for model in (record.target, record.draft)))
    return (
        f"{where}, {record.machine.cores_in_words}; target {record.target.num_parameters / 1e6:.1f}M, "
        f"draft {record.draft.num_parameters / 1e6:.2f}M, {record.target.dtype}"
    )


def throughput(record: Record) -> Figure:
    """Over concurrency, per arm: tokens per second of all clients together, and the same over plain."""
    figure, (rates, *_), (over, *_) = _throughput_panels(record)
    rates.set_ylabel("tokens per second, all together")
    over.set_ylabel("over plain decoding")
    lines, names = rates.get_legend_handles_labels()
    wrapped = [_wrapped(name) for name in names]
    figure.legend(lines, wrapped, fontsize=8, frameon=False, loc="outside right upper")
    rows = sum(name.count("\n") + 1 for name in wrapped)
    figure.set_figheight(max(figure.get_figheight(), 1 + 1.3 * _LINE * rows))
    return figure


def _throughput_panels(record: Record) -> tuple[Figure, list[Axes], list[Axes]]:
    from matplotlib.figure import Figure

    temperatures, levels = record.config.temperature, record.config.concurrency
    width = 4.6 * len(temperatures) + _CHARACTER * _NAME_WIDTH + 0.6
    figure = Figure(figsize=(width, 6.4), layout="constrained")
    grid = figure.subplots(2, len(temperatures), squeeze=False, sharex=True, sharey="row")
    _caption_below(figure, f"{_caption(record)}; {_RATES}")
    for rates, over, t in zip(*grid, temperatures, strict=True):
        rates.set_title(f"temperature {t:g}", fontsize=10)
        over.set_xscale("log", base=2)
        over.set_xticks(levels, [str(n) for n in levels])
        over.set_xlabel("requests at a time")
        for panel in (rates, over):
            panel.spines[["top", "right"]].set_visible(False)
            panel.grid(axis="y", alpha=0.3)
        for number, arm in enumerate(_arms_under_load(record, t)):
            cells = [cell for n in levels if (cell := record.cells.find(arm, t, n))]
            colour = f"C{number}" if arm.k else _BASE
            _line(rates, arm, {c.concurrency: c.tokens_per_second for c in cells}, colour)
            _line(over, arm, _over_plain(record, cells), colour)
        rates.set_ylim(bottom=0)
    return figure, list(grid[0]), list(grid[1])


def _over_plain(record: Record, cells: Sequence[Cell]) -> dict[int, Spread]:
    bases = [(cell, base_of(cell, record.cells, record.config)) for cell in cells]
    return {cell.concurrency: ratio(cell, base) for cell, base in bases if base}


def _line(panel: Axes, arm: Arm, spreads: Mapping[int, Spread], colour: str) -> None:
    panel.errorbar(
        list(spreads),
        [s.median for s in spreads.values()],
        yerr=_error(list(spreads.values())),
        label=arm.name,
        color=colour,
        marker="o",
        markersize=4,
        capsize=2,
        linestyle="-" if arm.k else ":" if arm.lookahead else "--",
    )


def _arms_under_load(record: Record, temperature: float) -> list[Arm]:
    """Those measured at the greatest concurrency."""
    return [cell.arm for cell in record.cells.at(temperature, max(record.config.concurrency))]


def _error(spreads: Sequence[Spread]) -> list[list[float]]:
    return [[s.median - s.q1 for s in spreads], [s.q3 - s.median for s in spreads]]


def one_request(record: Record) -> Figure:
    """Every arm's rate over plain decoding, one request at a time, with the theory's marks."""
    names = [cell.arm.name for cell in record.cells.at(record.config.temperature[0], 1)]
    figure, panels = _panels(record, names, 2.1, f"{_RATES}; ours from the first token on")
    for panel, t in zip(panels, record.config.temperature, strict=True):
        cells = record.cells.at(t, 1)
        base = next(cell for cell in cells if cell.arm == arms.plain(record.config))
        spreads = [decode_ratio(cell, base) or ratio(cell, base) for cell in cells]
        places = range(len(cells))
        panel.barh(
            places,
            [s.median for s in spreads],
            xerr=_error(spreads),
            color=[_THEIRS if c.arm.is_peer else _BASE if c is base else _OURS for c in cells],
            error_kw={"ecolor": "#555555", "elinewidth": 1, "capsize": 2},
        )
        most = max(s.median for s in spreads)
        for place, spread in zip(places, spreads, strict=True):
            inside = spread.median > 0.2 * most
            at, colour = (0.015 * most, "white") if inside else (1.1 * spread.q3, "black")
            panel.text(at, place, f"{spread.median:.2f}", va="center", fontsize=8, color=colour)
        panel.set_yticks(places, [_wrapped(cell.arm.name) for cell in cells], fontsize=8)
        panel.axvline(1, color=_BASE, linewidth=0.8)
        _theory_marks(panel, record, t)
        panel.set_xlabel("tokens per second over plain decoding", fontsize=9)
    panels[0].invert_yaxis()
    return figure


def _theory_marks(panel: Axes, record: Record, temperature: float) -> None:
    from matplotlib.transforms import ScaledTranslation

    found = record.figures(temperature)
    for value, style, label in (
        (found.predicted, "--", f"theorem 3.8, K={found.k}"),
        (found.free_draft_bound, ":", "free drafts"),
    ):
        if value is not None:
            panel.axvline(value, color="#c44e52", linestyle=style, linewidth=1, label=f"{label}: {value:.2f}")
    if panel.get_legend_handles_labels()[0]:
        # So far below the panel in inches, whatever its height: under the axis and its label.
        below = panel.transAxes + ScaledTranslation(0, -0.5, panel.figure.dpi_scale_trans)
        panel.legend(
            fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=below
        )


def rounds(record: Record) -> Figure:
    """Milliseconds of a round by part, and how many tokens it brings."""
    ours = [cell for cell in record.cells.at(record.config.temperature[0], 1) if not cell.arm.is_peer]
    names = [cell.arm.name for cell in ours]
    figure, panels = _panels(record, names, 1.7, "means, passes over prompts left out")
    for panel, t in zip(panels, record.config.temperature, strict=True):
        cells = [cell for cell in record.cells.at(t, 1) if not cell.arm.is_peer]
        left = [0.0] * len(cells)
        for part, colour in zip(PARTS, _PART_COLOURS, strict=True):
            widths = [1000 * cell.seconds_per_round[part] for cell in cells]
            panel.barh(range(len(cells)), widths, left=left, color=colour, label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for place, (cell, end) in enumerate(zip(cells, left, strict=True)):
            panel.text(end, place, _tokens_a_round(cell), va="center", fontsize=8)
        panel.set_yticks(range(len(cells)), [_wrapped(cell.arm.name) for cell in cells], fontsize=8)
        panel.set_xlabel("milliseconds of a round", fontsize=9)
        panel.margins(x=0.4)
    panels[0].invert_yaxis()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=len(PARTS), loc="outside upper center", fontsize=8, frameon=False)
    return figure


def _tokens_a_round(cell: Cell) -> str:
    """Nothing where answers end with their first round."""
    tokens = cell.tokens_per_round
    return "" if tokens is None else f" {tokens:.2f} tokens"
