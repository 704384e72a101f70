"""`paceline measure`: how well drafters predict a target on given prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.assets.checkpoints import check_model
from paceline.cli.options import option
from paceline.cli.printing import to_stderr, to_stdout
from paceline.core.errors import InvalidArgumentError
from paceline.core.system.cores import check_threads
from paceline.core.system.gpus import check_gpu
from paceline.core.system.own_packages import check_ours
from paceline.loadtest.prompts import EMBEDDED_KINDS, read_prompts
from paceline.plots import check_plots, draw_plots
from paceline.supervisor import sigterm_as_interrupt
from paceline.supervisor.preflight import check_writable

NO_DRAFT = "none"
EMBEDDED_TARGET, EMBEDDED_DRAFT = "embedded:target", "embedded:draft"


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(measure)


def measure(
    target_model: Annotated[
        str, option("target_model", "The large model: a directory, a hub id, or embedded:target.")
    ] = EMBEDDED_TARGET,
    draft_model: Annotated[
        list[str] | None,
        option(
            "draft_model",
            f"A small model to measure, or `{NO_DRAFT}`; may be repeated. The default is the embedded draft "
            "for the embedded target.",
        ),
    ] = None,
    drafter: Annotated[
        list[str] | None,
        option(
            "drafter",
            "A drafter without a model: unigram, bigram, ngram, random or stacked:a+b as of a draft worker, "
            "prompt-lookup, suffix or source:ngram as of a coordinator; may be repeated.",
        ),
    ] = None,
    corpus: Annotated[str, option("corpus", "A text file that unigram and bigram count.")] = "",
    prompts: Annotated[
        Path,
        option(
            "prompts",
            f"JSON lines with prompt, optional max_tokens and kind; {EMBEDDED_KINDS} has eight kinds.",
        ),
    ] = Path(EMBEDDED_KINDS),
    temperature: Annotated[
        list[float] | None, option("temperature", "0 is greedy; may be repeated. [default: 0 1]")
    ] = None,
    top_k: Annotated[int, option("top_k", "Keep this many of the most likely tokens; 0 keeps all.")] = 0,
    top_p: Annotated[
        float, option("top_p", "Keep the most likely tokens that together have this probability.")
    ] = 1.0,
    max_tokens: Annotated[
        int, option("max_tokens", "Tokens that the target writes after each prompt.")
    ] = 128,
    max_k: Annotated[int, option("max_k", "Largest K of the predictions.")] = 16,
    seed: Annotated[int, option("seed", "Seed of the first text; each further one adds 1.")] = 0,
    device: Annotated[str, option("device", "Device of all models: auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, option("dtype", "auto, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[int, option("threads", "CPU threads of each model.")] = 1,
    json: Annotated[Path | None, option("json", "Write all results to this file.", dir_okay=False)] = None,
    plots: Annotated[
        Path | None,
        option("plots", "Draw the paper's figures 2 to 4 with the measured values into this folder."),
    ] = None,
) -> None:
    """Measure acceptance and step times of drafters on text that the target writes, and predict speed-ups."""
    for package in ("coordinator", "draft_worker"):
        check_ours(package)
    from paceline.measure import MeasureConfig, print_measures, run_measure

    check_model("target_model", target_model)
    config = MeasureConfig(
        target_model=target_model,
        draft_models=_draft_models(target_model, draft_model or [], drafter or []),
        drafters=tuple(drafter or ()),
        corpus=corpus,
        temperature=tuple(temperature or (0.0, 1.0)),
        top_k=top_k,
        top_p=top_p,
        max_tokens=max_tokens,
        max_k=max_k,
        seed=seed,
        device=device,
        dtype=dtype,
        threads=threads,
    )
    for name in config.draft_models:
        check_model("draft_model", name)
    check_gpu("device", device)
    check_threads("threads", threads)
    lines = read_prompts(prompts)
    if json is not None:
        check_writable("json", json)
    if plots is not None:
        check_plots(plots)
    told = to_stderr()
    with sigterm_as_interrupt(), told.status("") as status:
        record = run_measure(config, lines, status.update if told.is_terminal else told.print)
    print_measures(record, to_stdout())
    if json is not None:
        record.write(json)
    if plots is not None:
        for file in draw_plots(record.marks, plots):
            told.print(f"drawn: {file}")


def _draft_models(target: str, given: list[str], drafters: list[str]) -> tuple[str, ...]:
    """The draft models. Raises InvalidArgumentError naming `draft_model`."""
    if given == [NO_DRAFT]:
        return ()
    if NO_DRAFT in given:
        raise InvalidArgumentError("draft_model", f"{NO_DRAFT} cannot be combined with a model")
    if not given and target.startswith(EMBEDDED_TARGET):
        return (EMBEDDED_DRAFT,)
    if not given and not drafters:
        raise InvalidArgumentError("draft_model", f"is required for the target {target}")
    return tuple(given)
