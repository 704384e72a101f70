"""`paceline plan` and `paceline demo`: expected and demonstrated gain of speculation."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from paceline.cli.options import DRAFT_TOKENS, option
from paceline.core.system.gpus import check_gpu
from paceline.core.types import AcceptanceMode
from paceline.core.validation import device as check_device
from paceline.demo import DemoConfig, run_demo
from paceline.plan import Plan, make_plan
from paceline.plots import Mark, check_plots, draw_plots
from paceline.supervisor import StackConfig, sigterm_as_interrupt

DEMO = DemoConfig()
_TABLE_ROWS = 8  # rows before only the best and the given K are shown
_PLOT_SIZE = (72, 16)  # columns, rows


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.command()(plan)
    app.command()(demo)


def plan(
    alpha: Annotated[float, option("alpha", "Acceptance rate of one draft token.")] = 0.8,
    c: Annotated[float, option("c", "Time of one draft step over the time of one target step.")] = 0.05,
    k: Annotated[int, option("k", "Draft tokens per round.")] = 4,
    max_k: Annotated[int, option("max_k", "Largest K to consider.")] = 16,
    overhead: Annotated[
        float, option("overhead", "Wire and queue time of a round over the target's step.")
    ] = 0.0,
    row_cost: Annotated[float, option("row_cost", "Extra time of a row over the target's step.")] = 0.0,
    c_hat: Annotated[
        float,
        option("c_hat", "The draft's operations per token, and the memory it reads, over the target's."),
    ] = 0.0,
    as_json: Annotated[bool, option("json", "Print one JSON object.")] = False,
    plots: Annotated[
        Path | None, option("plots", "Draw the paper's figures 2 to 4 with alpha and c into this folder.")
    ] = None,
) -> None:
    """Show the speed-up predicted by theory for an acceptance rate, a cost ratio and K."""
    result = make_plan(alpha, c, k, max_k=max_k, overhead=overhead, row_cost=row_cost, c_hat=c_hat)
    if plots is not None:
        check_plots(plots)
        draw_plots([Mark("given", alpha, c)], plots)
    if as_json:
        print(json.dumps(result.to_dict()))
        return
    console = Console(highlight=False)
    console.print(_headline(result))
    console.print(_table(result))
    _plot(result, console)


def demo(
    max_tokens: Annotated[int, option("max_tokens", "Most tokens to generate.")] = DEMO.max_tokens,
    temperature: Annotated[float, option("temperature", "0 is greedy.")] = DEMO.temperature,
    seed: Annotated[
        int, option("seed", "The same seed gives the same tokens, in coupled mode and at temperature 0.")
    ] = DEMO.seed,
    prompt: Annotated[str, option("prompt", "The prompt.", show_default=False)] = DEMO.prompt,
    pairs: Annotated[int, option("pairs", "Measured requests with and without speculation.")] = DEMO.pairs,
    target_model: Annotated[str, option("target_model", "The large model.")] = DEMO.stack.target_model,
    draft_model: Annotated[str, option("draft_model", "The small model.")] = str(DEMO.stack.draft_model),
    device: Annotated[str, option("device", "Device of both models.")] = DEMO.stack.target_device,
    num_speculative_tokens: Annotated[
        Any, option("num_speculative_tokens", "Draft tokens per round (K), or auto.", **DRAFT_TOKENS)
    ] = DEMO.stack.num_speculative_tokens,
    acceptance: Annotated[
        AcceptanceMode, option("acceptance", "How the target decides on draft tokens.")
    ] = DEMO.stack.acceptance,
    verbose: Annotated[bool, option("verbose", "Show the logs of the processes.")] = False,
) -> None:
    """Stream one completion on this machine, coloured by token origin, and show where its time went."""
    check_gpu("device", check_device("device", device))
    stack = StackConfig(
        target_model=target_model,
        draft_model=draft_model,
        target_device=device,
        draft_device=device,
        num_speculative_tokens=num_speculative_tokens,
        acceptance=acceptance,
    )
    config = DemoConfig(
        stack=stack,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        pairs=pairs,
        verbose=verbose,
    )
    with sigterm_as_interrupt():
        run_demo(config, Console(highlight=False))


def _headline(result: Plan) -> str:
    lines = [
        f"K = {result.k}: {result.expected_tokens:.2f} tokens per round, {result.speedup:.2f}× plain speed",
        f"best K = {result.best_k}: {result.best_speedup:.2f}×; with lookahead, K = "
        f"{result.best_k_with_lookahead}: at most {result.best_speedup_with_lookahead:.2f}×",
        f"upper bound with a K chosen for each round: {_bound(result.oracle_bound_with_c)}",
        f"upper bound for a chain of any length: {_bound(result.oracle_bound)}",
    ]
    if result.least_improvement is not None:
        lines.append(f"K = 1 without overhead, a lower bound: {result.least_improvement:.2f}×")
    if not result.improvement_possible:
        lines.append("speculation cannot help: α must be greater than c")
    return "\n".join(lines)


def _bound(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}×"


def _table(result: Plan) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("K", "tokens per round", "speed-up", "with lookahead", "operations", "memory"):
        table.add_column(title, justify="right")
    table.add_column()
    for row in result.rows:
        if row.k > _TABLE_ROWS and row.k not in (result.k, result.best_k):
            continue
        mark = "← best" if row.k == result.best_k else "← given" if row.k == result.k else ""
        table.add_row(
            str(row.k),
            f"{row.expected_tokens:.2f}",
            f"{row.speedup:.2f}",
            f"{row.speedup_with_lookahead:.2f}",
            f"{row.operations:.2f}",
            f"{row.memory:.2f}",
            mark,
            style="bold" if mark else None,
        )
    return table


def _plot(result: Plan, console: Console) -> None:
    if importlib.util.find_spec("plotext") is None:
        console.print("(pip install plotext for a plot)")
        return
    import plotext

    figure = plotext.figure
    figure.clear()
    for label, values in (
        (f"c = {result.c:g}", [row.speedup for row in result.rows]),
        ("with lookahead", [row.speedup_with_lookahead for row in result.rows]),
    ):
        curve = figure.signal([row.k for row in result.rows], values, marker="braille")
        curve.label(label)
        curve.lines()
        figure.draw(curve)
    figure.plot_size(*_PLOT_SIZE)
    figure.title(f"speed-up over K, α = {result.alpha:g}")
    figure.label("K")
    figure.ruler("x").ticks([row.k for row in result.rows][:: max(1, len(result.rows) // 8)])
    colorless = console.no_color or not console.is_terminal
    figure.theme("colorless" if colorless else "default")
    print(figure.build().string(colorless=colorless))
