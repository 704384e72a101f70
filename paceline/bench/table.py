"""A run as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from paceline.bench import arms
from paceline.bench.cells import PARTS, Cell, ratio
from paceline.bench.config import BenchConfig
from paceline.bench.figures import BY_K, RATIOS, Figures, Ratio, base_of
from paceline.bench.processor import PROCESSES
from paceline.bench.record import Record

_SHORT = {"coordinator": "coord"}


def print_record(record: Record, console: Console) -> None:
    """All of it: what ran where, rates, figures, ratios, notes."""
    console.print(heading(record))
    temperatures = record.config.temperature
    if 1 in record.config.concurrency:
        for t in temperatures:
            console.print()
            console.print(one_request(record, t))
        if len(record.config.k) > 1:
            for t in temperatures:
                console.print()
                console.print(each_k(record, t))
    if record.config.measures_load:
        for t in temperatures:
            console.print()
            console.print(concurrent(record, t))
            console.print()
            console.print(processor_time(record, t))
    if 1 in record.config.concurrency:
        console.print()
        console.print(figures_table({t: record.figures(t) for t in temperatures}))
    console.print()
    console.print(ratios_table(record))
    for note in record.notes:
        console.print(f"- {note}")


def heading(record: Record) -> str:
    """What ran, and on what."""
    machine, config = record.machine, record.config
    versions = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    return (
        f"{machine.processor}, {machine.cores_in_words}; Python {machine.python}, {versions}\n"
        f"target {record.target.name} ({record.target.num_parameters / 1e6:.1f}M, {record.target.dtype}, "
        f"{record.target.device}), draft {record.draft.name} ({record.draft.num_parameters / 1e6:.2f}M, "
        f"{record.draft.dtype}, {record.draft.device})\n"
        f"{len(record.prompt_lengths)} prompts of {min(record.prompt_lengths)} to "
        f"{max(record.prompt_lengths)} tokens, {config.max_tokens} tokens each{_spread(config)}, "
        f"{config.repeats} time(s), in {record.seconds:.0f} s; medians [quartiles]"
    )


def _spread(config: BenchConfig) -> str:
    if not (config.measures_load and config.length_spread):
        return ""
    return f" (of several at a time up to {config.length_spread:.0%} more or less)"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=None, pad_edge=False, title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def one_request(record: Record, temperature: float) -> Table:
    """Every arm, alone on the machine: rates, and milliseconds of each part of a round."""
    table = _table(
        f"One request at a time, temperature {temperature:g} (parts of a round in ms)",
        "tok/s",
        "[quartiles]",
        "over plain",
        "accepted",
        "tok/round",
        "hits",
        *(_SHORT.get(part, part) for part in PARTS),
    )
    base = record.cells.find(arms.plain(record.config), temperature, 1)
    for cell in record.cells.at(temperature, 1):
        spread = cell.tokens_per_second
        row = [
            cell.arm.name,
            f"{spread.median:.1f}",
            f"{spread.q1:.0f}-{spread.q3:.0f}",
            f"{ratio(cell, base).median:.2f}" if base else "",
        ]
        table.add_row(*row, *_round_columns(cell))
    return table


def _round_columns(cell: Cell) -> Iterable[str]:
    counts = cell.counts
    if cell.arm.is_peer:
        return
    yield _percent(counts.acceptance_rate)
    yield _number(cell.tokens_per_round)
    yield _percent(counts.hit_rate)
    for seconds in cell.seconds_per_round.values():
        yield f"{1000 * seconds:.2f}"


def each_k(record: Record, temperature: float) -> Table:
    """What each K makes of one request, and what lookahead adds to it."""
    table = _table(
        f"By K, one request, temperature {temperature:g}",
        *(f"K = {k}" for k in record.config.k),
    )
    explained = [record.figures(temperature, k) for k in record.config.k]
    found = [record.by_k(temperature, figures) for figures in explained]
    for name in BY_K:
        table.add_row(name, *(_ratio(ratios[name]) for ratios in found))
    table.add_row("hit rate of lookahead", *(_percent(figures.hit_rate) for figures in explained))
    return table


def concurrent(record: Record, temperature: float) -> Table:
    """Tokens per second of all clients together, and over plain decoding, by concurrency."""
    levels = record.config.concurrency
    table = _table(
        f"Requests at a time, temperature {temperature:g}: tokens/s of all together (over plain)",
        *(str(n) for n in levels),
    )
    rows = dict.fromkeys(arm for n in levels for arm in (c.arm for c in record.cells.at(temperature, n)))
    for arm in rows:
        cells = [record.cells.find(arm, temperature, n) for n in levels]
        if any(cell is not None and cell.concurrency > 1 for cell in cells):
            table.add_row(
                arm.name,
                *(_rate_over(cell, record) if cell else "" for cell in cells),
            )
    shares = [[share for cell in _cells(record, temperature, n) for share in cell.client_cpu] for n in levels]
    table.add_row("client's share of a core, at most", *(f"{max(each):.0%}" for each in shares))
    return table


def processor_time(record: Record, temperature: float) -> Table:
    """What a token costs each process, prompts included, by concurrency."""
    levels = record.config.concurrency
    table = _table(
        f"Processor time of a token in ms, temperature {temperature:g} ({', '.join(PROCESSES)})",
        *(str(n) for n in levels),
    )
    rows = dict.fromkeys(cell.arm for n in levels for cell in _cells(record, temperature, n))
    for arm in rows:
        cells = [record.cells.find(arm, temperature, n) for n in levels]
        table.add_row(arm.name, *(_each_process(cell) if cell else "" for cell in cells))
    return table


def _each_process(cell: Cell) -> str:
    return " ".join(f"{1000 * seconds:.2f}" for seconds in cell.processor_seconds_per_token.values())


def _cells(record: Record, temperature: float, concurrency: int) -> list[Cell]:
    return [cell for cell in record.cells.at(temperature, concurrency) if not cell.arm.is_peer]


def _rate_over(cell: Cell, record: Record) -> str:
    base, rate = base_of(cell, record.cells, record.config), f"{cell.tokens_per_second.median:.0f}"
    return rate if base is None or base.arm == cell.arm else f"{rate} ({ratio(cell, base).median:.2f})"


def figures_table(by_temperature: dict[float, Figures]) -> Table:
    """Theory beside what was measured, one column a temperature."""
    k = next(iter(by_temperature.values())).k
    table = _table(f"What explains it, one request, K = {k}", *(f"T = {t:g}" for t in by_temperature))
    found = list(by_temperature.values())
    rows: tuple[tuple[str, list[str]], ...] = (
        ("α: accepted of the draft tokens judged", [_number(f.alpha) for f in found]),
        ("c: draft's token over target's step, no lookahead", [_number(f.c, 3) for f in found]),
        ("hit rate of lookahead", [_percent(f.hit_rate) for f in found]),
        ("share of draft time hidden", [_percent(f.hidden_draft_share) for f in found]),
        ("speed-up by theorem 3.8", [_number(f.predicted) for f in found]),
        ("... with the target time a round waits for", [_number(f.predicted_with_rows) for f in found]),
        ("... with queue, wire and coordinator, lookahead", [_number(f.predicted_with_costs) for f in found]),
        ("speed-up with free drafts, (1-α^(K+1))/(1-α)", [_number(f.free_draft_bound) for f in found]),
        (
            "speed-up of decoding measured, without lookahead",
            [_number(f.measured_without_lookahead) for f in found],
        ),
        ("speed-up of decoding measured, with lookahead", [_number(f.measured) for f in found]),
        ("target time a round waits for, over a step", [_number(f.verification_over_step) for f in found]),
        ("target's step, ms", [_milliseconds(f.target_step_seconds) for f in found]),
        ("its memory-bandwidth floor, ms", [_milliseconds(f.bandwidth_floor_seconds) for f in found]),
        ("step over floor", [_number(f.target_step_over_floor) for f in found]),
        ("coordinator and wire, share of a round", [_percent(f.coordinator_and_wire_share) for f in found]),
    )
    for name, values in rows:
        table.add_row(name, *values)
    return table


def ratios_table(record: Record) -> Table:
    """All ratios at every temperature, with quartiles of their pairs."""
    table = _table("Ratios", *(f"T = {t:g}" for t in record.config.temperature))
    found = [record.ratios(t) for t in record.config.temperature]
    for name in RATIOS:
        table.add_row(name, *(_ratio(ratios[name]) for ratios in found))
    return table


def _ratio(value: Ratio | None) -> str:
    if value is None:
        return "not measured"
    where = f" at {value.concurrency}" if value.concurrency > 1 else ""
    return f"{value.value:.2f} [{value.q1:.2f}-{value.q3:.2f}]{where}"


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{1000 * value:.2f}"
