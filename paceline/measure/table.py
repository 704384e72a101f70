"""A measurement as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from paceline.measure.figures import MeasuredRow
from paceline.measure.record import MeasureRecord


def print_measures(record: MeasureRecord, console: Console) -> None:
    """Print the setup, costs, measured rates and predictions."""
    console.print(heading(record))
    for table in (costs(record), rates(record.rows), predictions(record.rows)):
        console.print()
        console.print(table)
    console.print()
    console.print(
        "Speed-ups are predictions. They assume that K + 1 rows cost the target as much as one, and that "
        "messages take no time."
    )


def heading(record: MeasureRecord) -> str:
    """Machine, models and texts."""
    machine, config, target = record.machine, record.config, record.target
    row = record.overall[0]
    return (
        f"{machine.processor}, {machine.cores_in_words}, {config.threads} thread(s) per model\n"
        f"target {target.name} ({target.num_parameters / 1e6:.1f}M, {target.dtype}, {target.device}), "
        f"{1000 * record.target_step_seconds:.2f} ms a step; {row.texts} texts, {row.positions} positions at "
        f"temperature {row.temperature:g}; in {record.seconds:.0f} s"
    )


def _table(title: str, names: Sequence[str], columns: Sequence[str]) -> Table:
    table = Table(title=title, box=None, pad_edge=False, title_justify="left")
    for name in names:
        table.add_column(name)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def costs(record: MeasureRecord) -> Table:
    """Cost of a drafter's step over a step of the target."""
    table = _table(
        "A step over a step of the target", ("drafter",), ("c", "[quartiles]", "operations", "memory")
    )
    for name, cost in record.costs.items():
        c = cost.c
        table.add_row(name, f"{c.median:.4f}", f"{c.q1:.4f}-{c.q3:.4f}", f"{cost.c_hat:.3f}", f"{cost.m:.3f}")
    return table


_NAMES = ("kind", "T", "drafter")


def rates(rows: Sequence[MeasuredRow]) -> Table:
    """What was measured at each position."""
    columns = ("positions", "guessed", "alpha", "+-", "D_LK", "coupled", "equal argmax", "autocorrelation")
    table = _table("Measured, mean over positions", _NAMES, columns)
    for row in rows:
        table.add_row(
            *_names(row),
            str(row.positions),
            f"{row.guessed:.0%}",
            f"{row.alpha:.3f}",
            _number(row.alpha_error),
            f"{row.d_lk:.3f}",
            f"{row.coupled:.3f}",
            f"{row.equal_argmaxes:.3f}",
            _number(row.autocorrelation[0]),
        )
    return table


def predictions(rows: Sequence[MeasuredRow]) -> Table:
    """The speed-ups to expect: by ratio test, and in coupled mode."""
    columns = (
        "best K",
        "speed-up",
        "on texts",
        "lookahead",
        "varying K",
        "at least",
        "operations",
        "memory",
        "coupled: best K",
        "speed-up",
        "on texts",
    )
    table = _table("Predicted from alpha and c; on the right in coupled mode", _NAMES, columns)
    for row in rows:
        ratio, coupled = row.predictions["rejection"], row.predictions["coupled"]
        plan = ratio.plan
        best = plan.rows[plan.k]
        table.add_row(
            *_names(row),
            str(plan.k),
            f"{ratio.speedup:.2f}",
            f"{ratio.speedup_on_texts:.2f}",
            f"{plan.best_speedup_with_lookahead:.2f} (K {plan.best_k_with_lookahead})",
            _number(plan.oracle_bound_with_c, 2),
            _number(plan.least_improvement, 2),
            f"{best.operations:.2f}",
            f"{best.memory:.2f}",
            str(coupled.plan.k),
            f"{coupled.speedup:.2f}",
            f"{coupled.speedup_on_texts:.2f}",
        )
    return table


def _names(row: MeasuredRow) -> tuple[str, str, str]:
    return row.kind, f"{row.temperature:g}", row.drafter


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"
