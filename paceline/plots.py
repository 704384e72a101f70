"""Figures 2, 3 and 4 of Leviathan et al. 2023, with measured values marked.

matplotlib (extra `plots`) is imported when the plots are drawn.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.core.errors import InvalidArgumentError
from paceline.decoding import theory

_KS: Final = (1, 2, 3, 5, 7, 10)
_CS: Final = (0.01, 0.02, 0.05, 0.1, 0.2)
_LARGEST_K: Final = 32
_ALPHAS: Final = tuple(i / 200 for i in range(200))
_LIMIT: Final = 10.0  # of the vertical axes for tokens and factors; curves are unbounded near alpha = 1
_SIZE: Final = (10.0, 4.5)  # inches


@dataclass(frozen=True, slots=True)
class Mark:
    """A measured acceptance rate and cost ratio."""

    label: str
    alpha: float
    c: float


def check_plots(folder: Path) -> None:
    """Raises InvalidArgumentError naming `plots` if matplotlib is missing or the folder cannot be made."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidArgumentError("plots", "requires matplotlib: install paceline[plots]")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError("plots", f"{folder} cannot be made: {error.strerror}") from None


def draw_plots(marks: Sequence[Mark], folder: Path) -> list[Path]:
    """Draw the three figures as PNG files; returns their paths. Raises OSError."""
    return [
        _drawn(folder / "figure-2-tokens-per-round.png", lambda axes: _tokens(axes, marks)),
        _drawn(folder / "figure-3-best-k.png", lambda axes: _best_k(axes, marks)),
        _drawn(folder / "figure-4-speed-and-operations.png", lambda axes: _trade_off(axes, marks)),
    ]


def _drawn(file: Path, draw: Callable[[Any], None]) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw(axes)
    axes.set_xlabel("α")
    axes.set_xlim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.savefig(file, dpi=120)
    return file


def _tokens(axes: Any, marks: Iterable[Mark]) -> None:
    for k in _KS:
        axes.plot(_ALPHAS, [theory.expected_tokens(alpha, k) for alpha in _ALPHAS], label=f"K = {k}")
    axes.plot(_ALPHAS, [theory.oracle_bound(a) for a in _ALPHAS], "k:", label="K unbounded")
    for number, mark in enumerate(marks):
        _mark(axes, number, mark, [theory.expected_tokens(mark.alpha, k) for k in _KS])
    axes.set_ylim(1, _LIMIT)
    axes.set_ylabel("tokens per round (equation 1)")


def _best_k(axes: Any, marks: Iterable[Mark]) -> None:
    for c in _CS:
        ks = [theory.best_k(alpha, c, _LARGEST_K) for alpha in _ALPHAS]
        axes.plot(_ALPHAS, ks, drawstyle="steps-post", label=f"c = {c:g}")
    for number, mark in enumerate(marks):
        _mark(axes, number, mark, [theory.best_k(mark.alpha, mark.c, _LARGEST_K)])
    axes.set_ylim(0, _LARGEST_K)
    axes.set_ylabel("best K (theorem 3.8)")


def _trade_off(axes: Any, marks: Iterable[Mark]) -> None:
    for k in _KS:
        (curve,) = axes.plot(
            _ALPHAS, [theory.speedup(alpha, 0.0, k) for alpha in _ALPHAS], label=f"speed-up, K = {k}, c = 0"
        )
        operations = [theory.operations_factor(alpha, 0.0, k) for alpha in _ALPHAS]
        axes.plot(_ALPHAS, operations, "--", color=curve.get_color())
    axes.plot([], [], "--", color="grey", label="operations, the same K")
    for number, mark in enumerate(marks):
        best = theory.best_k(mark.alpha, mark.c, _LARGEST_K)
        _mark(axes, number, mark, [theory.speedup(mark.alpha, mark.c, best)], f", speed-up at K = {best}")
    axes.set_ylim(0, _LIMIT)
    axes.set_ylabel("factor over plain decoding")


def _mark(axes: Any, number: int, mark: Mark, values: Sequence[float], more: str = "") -> None:
    """Symbols at the values; one entry of the legend."""
    axes.plot(
        [mark.alpha] * len(values),
        values,
        "osD^v<>p*hX"[number % 11],
        color="black",
        markersize=5,
        markerfacecolor="none",
        clip_on=False,
        label=f"{mark.label}: α = {mark.alpha:.2f}, c = {mark.c:.3f}{more}",
    )
