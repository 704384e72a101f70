"""A load test as tables for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from paceline.loadtest.config import LoadConfig
from paceline.loadtest.report import Report
from paceline.loadtest.summary import Latency, SpeculationSummary, Summary

_MEASURES = {
    "ttft": "time to the first token",
    "tpot": "time per token after it",
    "itl": "gap between chunks",
    "e2e": "whole request",
}


def print_report(report: Report, console: Console) -> None:
    """Print the settings, outcomes, latencies, speculation statistics and notes."""
    found = report.summary
    console.print(heading(report))
    for table in (counts(report), latencies(found), speculation(found.speculation)):
        console.print()
        console.print(table)
    if report.notes:
        console.print()
    for note in report.notes:
        console.print(f"- {note}")


def heading(report: Report) -> str:
    """The server and the settings."""
    return f"{report.address}, {report.model.id}: {_shape(report.config)}, in {report.seconds:.1f} s"


def _shape(config: LoadConfig) -> str:
    if config.rate is None:
        return f"{config.places} at a time"
    how = "" if config.burstiness == 1 else f" (burstiness {config.burstiness:g})"
    most = "" if config.places is None else f", at most {config.places} at a time"
    return f"{config.rate:g} requests per second{how}{most}"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def counts(report: Report) -> Table:
    """Requests and rates."""
    found = report.summary
    table = _table("requests", "")
    table.add_row("sent", f"{found.requests:,}")
    reasons = ", ".join(f"{reason} {number:,}" for reason, number in found.by_finish_reason.items())
    table.add_row("finished", f"{found.finished:,}" + (f" ({reasons})" if reasons else ""))
    if found.resumed:
        table.add_row("... after resuming a broken stream", f"{found.resumed:,}")
    for name, number in found.failed.items():
        table.add_row(f"failed, {name}", f"{number:,}")
    if found.unsent:
        table.add_row("due but not sent before the end", f"{found.unsent:,}")
    if checked := report.verification:
        equal = checked.compared - len(checked.differences)
        table.add_row("verified by plain decoding: equal", f"{equal:,}")
        table.add_row("... different", f"{len(checked.differences):,}")
        if unknown := len(checked.failures) + checked.unasked:
            table.add_row("... failed or not verified", f"{unknown:,}")
    table.add_row("most at a time", f"{found.most_at_a_time:,}")
    if report.config.rate is not None:
        table.add_row("longest delay after the due time, ms", _milliseconds(found.latest))
    table.add_row("finished per second", f"{found.requests_per_second:.2f}")
    if found.goodput is not None:
        goals = ", ".join(f"{name} {goal:g} s" for name, goal in report.config.goals.items())
        table.add_row(f"of these within {goals}", f"{found.goodput:.2f}")
    table.add_row("prompt tokens per second", f"{found.prompt_tokens_per_second:,.1f}")
    table.add_row("completion tokens per second", f"{found.completion_tokens_per_second:,.1f}")
    return table


def latencies(found: Summary) -> Table:
    """Latencies of finished requests."""
    table = _table("milliseconds", "mean", "median", "p90", "p95", "p99", "most")
    for measure, latency in found.latencies.items():
        table.add_row(f"{_MEASURES[measure]} ({measure})", *_row(latency))
    return table


def _row(latency: Latency | None) -> list[str]:
    if latency is None:
        return []
    values = (latency.mean, latency.median, latency.p90, latency.p95, latency.p99, latency.most)
    return [_milliseconds(value) for value in values]


def speculation(found: SpeculationSummary) -> Table:
    """Speculation statistics."""
    table = _table("speculation", "")
    table.add_row("rounds", f"{found.num_rounds:,}")
    table.add_row("... with a proposal", f"{found.num_spec_steps:,}")
    table.add_row("... whose proposal was drafted ahead", f"{found.num_lookahead_hits:,}")
    table.add_row("... whose proposal was copied from the text", f"{found.num_prompt_lookups:,}")
    if found.tokens_per_round is not None:
        table.add_row("tokens per round", f"{found.tokens_per_round:.2f}")
    if found.draft_acceptance_rate is not None:
        table.add_row("draft acceptance rate", f"{found.draft_acceptance_rate:.0%}")
        table.add_row("mean acceptance length", f"{found.mean_acceptance_length:.2f}")
        shares = " ".join(f"{share:.2f}" for share in found.accepted_to_position)
        table.add_row("accepted to position 1, 2, ...", shares)
    if (parts := found.seconds_per_round) is not None:
        for part in ("draft", "target", "queue", "wire", "coordinator"):
            table.add_row(f"{part}, ms per round", _milliseconds(getattr(parts, part)))
    return table


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.2f}"
