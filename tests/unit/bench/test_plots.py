"""No text of a plot covers another one or leaves the picture, with few arms and with many."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from paceline.bench import plots
from paceline.bench.arms import Arm
from paceline.bench.cells import Cell, Cells
from paceline.bench.record import Record
from paceline.core.types import AcceptanceMode

pytest.importorskip("matplotlib")

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

SLACK = 0.5
"""Points by which boxes may meet: a box is larger than its letters."""


def few(record: Record) -> Record:
    """Plain decoding and one other arm, at one temperature."""
    config = replace(record.config, temperature=(0.0,), k=(4,), concurrency=(1,))
    names = ("plain", "speculative, coupled, K=4")
    return replace(
        record, config=config, cells=Cells(c for c in record.cells.at(0.0, 1) if c.arm.name in names)
    )


def many(record: Record) -> Record:
    """Every arm in every mode and with long names, at four temperatures and many levels of load."""
    temperatures, levels = (0.0, 0.5, 0.7, 1.0), (1, 2, 4, 8, 16, 32, 64, 128)
    config = replace(record.config, temperature=temperatures, concurrency=levels)
    cells: list[Cell] = []
    for t, n in itertools.product(temperatures, levels):
        for cell in record.cells.at(0.0, min(n, 4)):
            modes = list(AcceptanceMode) if cell.arm.k else [cell.arm.acceptance]
            for mode in modes if cell.arm.acceptance is not None else [None]:
                arm = replace(cell.arm, acceptance=mode)
                if cell.arm.is_peer:
                    arm = Arm(f"{cell.arm.name} with a name that goes on and on and on")
                if not any((c.arm, c.temperature, c.concurrency) == (arm, t, n) for c in cells):
                    cells.append(replace(cell, arm=arm, temperature=t, concurrency=n))
    return replace(record, config=config, cells=Cells(cells))


def as_it_is(record: Record) -> Record:
    return record


SIZES: dict[str, Callable[[Record], Record]] = {"few": few, "middle": as_it_is, "many": many}


def texts(figure: Figure) -> list[tuple[str, Bbox]]:
    """All that is shown, with its box in pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    FigureCanvasAgg(figure).draw()
    hidden = {id(text) for axes in figure.axes for text in unseen_ticks(axes)}
    found = [each for each in figure.findobj(Text) if isinstance(each, Text) and id(each) not in hidden]
    shown = [text for text in found if text.get_visible() and text.get_text().strip()]
    return [(text.get_text(), text.get_window_extent()) for text in shown]


def unseen_ticks(axes: Axes) -> Iterator[Text]:
    """Labels that a shared axis leaves to its neighbour, and those of ticks beyond the axis."""
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
            beyond = not low <= tick.get_loc() <= high
            yield from (label for label in (tick.label1, tick.label2) if beyond or not label.get_visible())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("draw", [plots.one_request, plots.rounds, plots.throughput])
def test_no_text_covers_another_or_leaves(
    record: Record, size: str, draw: Callable[[Record], Figure]
) -> None:
    figure = draw(SIZES[size](record))
    shown, slack = texts(figure), SLACK * figure.dpi / 72
    assert len(shown) > 5
    for name, box in shown:
        assert min(box.x0, box.y0) >= -slack, name
        assert max(box.x1 - figure.bbox.x1, box.y1 - figure.bbox.y1) <= slack, name
    for (name, box), (other, its) in itertools.combinations(shown, 2):
        across = min(box.x1, its.x1) - max(box.x0, its.x0)
        down = min(box.y1, its.y1) - max(box.y0, its.y0)
        assert min(across, down) <= slack, f"{name!r} and {other!r}"
