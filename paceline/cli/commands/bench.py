"""`paceline bench`: compare Paceline and transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.assets.checkpoints import check_model
from paceline.bench import FULL, QUICK, BenchConfig, print_record, run_bench
from paceline.cli.options import option
from paceline.cli.printing import to_stderr, to_stdout
from paceline.core.system.cores import check_threads
from paceline.core.system.gpus import check_gpu
from paceline.core.types import AcceptanceMode
from paceline.supervisor import log_to_stderr, sigterm_as_interrupt, steps_to
from paceline.supervisor.preflight import check_writable


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(bench)


def _default(name: str) -> str:
    """A field's value in both presets, for its help."""

    def shown(config: BenchConfig) -> str:
        value = getattr(config, name)
        values = value if isinstance(value, tuple) else (value,)
        return " ".join(str(v.value if isinstance(v, AcceptanceMode) else v) for v in values)

    full, quick = shown(FULL), shown(QUICK)
    return f"[default: {full}]" if full == quick else f"[default: {full}; with --quick {quick}]"


def _option(name: str, description: str) -> Any:
    return option(name, f"{description} {_default(name)}")


def bench(
    target_model: Annotated[str | None, _option("target_model", "The large model.")] = None,
    draft_model: Annotated[str | None, _option("draft_model", "The small model.")] = None,
    device: Annotated[str | None, _option("device", "Device of all models.")] = None,
    draft_device: Annotated[
        str | None,
        option("draft_device", "Device of Paceline's draft; the default is --device."),
    ] = None,
    dtype: Annotated[str | None, _option("dtype", "Number format of all models.")] = None,
    threads: Annotated[int | None, _option("threads", "CPU threads of each model.")] = None,
    temperature: Annotated[list[float] | None, _option("temperature", "May be repeated.")] = None,
    acceptance: Annotated[
        AcceptanceMode | None, _option("acceptance", "How the target decides on draft tokens.")
    ] = None,
    concurrency: Annotated[
        list[int] | None, _option("concurrency", "Concurrent requests; may be repeated.")
    ] = None,
    k: Annotated[
        list[int] | None,
        _option("k", "Fixed K to measure in addition to 0 and auto; may be repeated."),
    ] = None,
    max_tree_nodes: Annotated[
        list[int] | None,
        option("max_tree_nodes", "Draft trees to measure, by nodes; may be repeated. None by default."),
    ] = None,
    tree_width: Annotated[
        int | None, _option("tree_width", "Most children of a node of --max-tree-nodes.")
    ] = None,
    max_tokens: Annotated[int | None, _option("max_tokens", "Tokens of each request, on average.")] = None,
    repeats: Annotated[int | None, _option("repeats", "Number of measured runs; peers run once.")] = None,
    num_prompts: Annotated[int | None, _option("num_prompts", "Number of prompts.")] = None,
    no_peers: Annotated[bool, option("no_peers", "Do not measure transformers.")] = False,
    quick: Annotated[bool, option("quick", "Measure only single requests, in a few minutes.")] = False,
    json: Annotated[Path | None, option("json", "Write all results to this file.", dir_okay=False)] = None,
    verbose: Annotated[bool, option("verbose", "Show the logs of the processes.")] = False,
) -> None:
    """Compare plain, speculative and lookahead decoding with transformers in one run."""
    given = {
        "target_model": target_model,
        "draft_model": draft_model,
        "device": device,
        "draft_device": draft_device,
        "dtype": dtype,
        "threads": threads,
        "temperature": temperature,
        "acceptance": acceptance,
        "concurrency": concurrency,
        "k": k,
        "max_tree_nodes": max_tree_nodes,
        "tree_width": tree_width,
        "max_tokens": max_tokens,
        "repeats": repeats,
        "num_prompts": num_prompts,
        "peers": False if no_peers else None,
    }
    config = configured(QUICK if quick else FULL, given)
    _check_here(config)
    if json is not None:
        check_writable("json", json)
    told = to_stderr()
    with sigterm_as_interrupt(), told.status("") as status:
        progress = status.update if told.is_terminal else told.print
        record = run_bench(config, sink=log_to_stderr if verbose else steps_to(progress), progress=progress)
    print_record(record, to_stdout())  # before writing the file, which may fail
    if json is not None:
        record.write(json)


def _check_here(config: BenchConfig) -> None:
    """Check models and devices before loading. Raises InvalidArgumentError naming the field."""
    check_model("target_model", config.target_model)
    check_model("draft_model", config.draft_model)
    check_gpu("device", config.device)
    check_gpu("draft_device", config.device_of_draft)
    check_threads("threads", config.threads)


def configured(preset: BenchConfig, given: dict[str, Any]) -> BenchConfig:
    """The preset with the given options. Raises InvalidArgumentError naming the field."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if value is not None and value != []
    }
    return replace(preset, **values)
