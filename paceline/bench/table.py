"""A run as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields

from rich.console import Console
from rich.table import Table

from paceline.bench import arms
from paceline.bench.cells import PARTS, Cell, Ratio, cells_at
from paceline.bench.figures import Service, SpeculationFigures, base_of
from paceline.bench.record import BenchRecord

_SHORT = {"coordinator": "coord"}
_SHARES = ("hit_rate", "coordinator_and_wire_share")


def print_record(record: BenchRecord, console: Console) -> None:
    """Print the setup, rates, ratios, figures and notes."""
    console.print(heading(record))
    alone = 1 in record.config.concurrency
    for t in record.config.temperature:
        tables = [one_request(record, t), speculation(record.speculation(t))] if alone else []
        tables += [concurrent(record, t)] if record.config.measures_load else []
        for table in (*tables, service(record.service(t))):
            console.print()
            console.print(table)
    console.print()
    for note in record.notes:
        console.print(f"- {note}")


def heading(record: BenchRecord) -> str:
    """Machine, models and settings."""
    machine, config = record.machine, record.config
    versions = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    return (
        f"{machine.processor}, {machine.cores_in_words}; Python {machine.python}, {versions}\n"
        f"target {record.target.name} ({record.target.num_parameters / 1e6:.1f}M, {record.target.dtype}, "
        f"{record.target.device}), draft {record.draft.name} ({record.draft.num_parameters / 1e6:.2f}M, "
        f"{record.draft.dtype}, {record.draft.device}), {config.acceptance.value}\n"
        f"{len(record.prompt_lengths)} prompts of {min(record.prompt_lengths)} to "
        f"{max(record.prompt_lengths)} tokens, {config.max_tokens} tokens each, "
        f"{config.repeats} time(s), in {record.seconds:.0f} s; medians [quartiles]"
    )


def _table(title: str, columns: Iterable[str]) -> Table:
    table = Table(title=title, box=None, pad_edge=False, title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def one_request(record: BenchRecord, temperature: float) -> Table:
    """Every arm at concurrency 1: rates of whole requests, and milliseconds of each part of a round."""
    table = _table(
        f"One request at a time, temperature {temperature:g} (parts of a round in ms)",
        [
            "tok/s",
            "[quartiles]",
            "over plain",
            "tok/round",
            "hits",
            *(_SHORT.get(part, part) for part in PARTS),
        ],
    )
    base = record.cells[arms.PLAIN, temperature, 1]
    for cell in cells_at(record.cells, temperature, 1):
        spread = cell.tokens_per_second
        row = [
            f"{spread.median:.1f}",
            f"{spread.q1:.0f}-{spread.q3:.0f}",
            f"{Ratio.between(cell, base).value:.2f}",
        ]
        if not cell.arm.is_peer:
            rounds = cell.decoding
            row += [_number(rounds.tokens_per_round), _percent(rounds.hit_rate)]
            row += [f"{1000 * seconds:.2f}" for seconds in rounds.parts.values()]
        table.add_row(cell.arm.name, *row)
    return table


def speculation(found: Sequence[SpeculationFigures]) -> Table:
    """The effect of each K on one request, and its causes."""
    title = f"SpeculationFigures by K, temperature {found[0].temperature:g}"
    table = _table(title, (f"K = {each.k}" for each in found))
    for name in [field.name for field in fields(SpeculationFigures)][2:]:
        table.add_row(name, *(_shown(name, getattr(each, name)) for each in found))
    return table


def concurrent(record: BenchRecord, temperature: float) -> Table:
    """Tokens per second of all clients together, and relative to plain decoding, by concurrency."""
    levels = record.config.concurrency
    table = _table(f"Tokens/s of all, temperature {temperature:g} (over plain)", map(str, levels))
    ours = {n: [c for c in cells_at(record.cells, temperature, n) if not c.arm.is_peer] for n in levels}
    for arm in dict.fromkeys(cell.arm for n in levels if n > 1 for cell in ours[n]):
        cells = [record.cells.get((arm, temperature, n)) for n in levels]
        table.add_row(arm.name, *(_rate_over_plain(cell, record) if cell else "" for cell in cells))
    shares = [max(share for cell in ours[n] for share in cell.client_cpu) for n in levels]
    table.add_row("highest client CPU share", *map(_percent, shares))
    return table


def _rate_over_plain(cell: Cell, record: BenchRecord) -> str:
    rate = f"{cell.tokens_per_second.median:.0f}"
    if cell.arm == arms.PLAIN:
        return rate
    base = base_of(record.cells, cell.temperature, cell.concurrency)
    return f"{rate} ({Ratio.between(cell, base).value:.2f})"


def service(found: Sequence[Service]) -> Table:
    """The service with default settings, by concurrency."""
    names = [field.name for field in fields(Service)][2:]
    title = f"The service with default settings, by concurrency, temperature {found[0].temperature:g}"
    table = _table(title, names)
    for each in found:
        table.add_row(str(each.concurrency), *(_shown(name, getattr(each, name)) for name in names))
    return table


def _shown(name: str, value: Ratio | float | None) -> str:
    if isinstance(value, Ratio):
        return f"{value.value:.2f} [{value.q1:.2f}-{value.q3:.2f}]"
    if value is not None and name.endswith("_seconds"):
        return f"{1000 * value:.2f} ms"
    return _percent(value) if name in _SHARES else _number(value, 3)


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
