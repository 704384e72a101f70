"""A measurement from start to record."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from paceline.assets.tokenizer import load_tokenizer
from paceline.bench.machine import Machine
from paceline.core.clock import Clock
from paceline.core.config import DraftConfig
from paceline.core.errors import InvalidArgumentError
from paceline.engine.loading.model import take_over_library_logs
from paceline.loadtest.prompts import PromptLine
from paceline.measure.config import MeasureConfig
from paceline.measure.drafters import MeasuredDrafter, check_corpus, make_drafter
from paceline.measure.figures import ALL_KINDS, DrafterCost, measured_rows
from paceline.measure.measuring import Measurement, PromptText
from paceline.measure.models import check_pair, load
from paceline.measure.record import MeasureRecord

Progress = Callable[[str], None]
"""Receives a description of the current step."""


def run_measure(
    config: MeasureConfig,
    prompts: Sequence[PromptLine],
    progress: Progress,
    *,
    clock: Clock = time.perf_counter,
) -> MeasureRecord:
    """Load the models, measure, and compute the figures. Raises PacelineError.

    Args:
        config: the settings.
        prompts: at least one, text or token ids; each may have a kind and its own `max_tokens`.
        progress: receives descriptions of steps.
        clock: times the steps, in seconds.
    """
    begun = time.perf_counter()
    check_corpus(config.corpus, config.drafters)
    take_over_library_logs(quiet=True)
    texts = _texts(config, prompts)
    longest = max(len(text.prompt) + text.max_tokens for text in texts)
    progress(f"loading {config.target_model}")
    target = load("target", config.target_model, config, longest, clock)
    _check_ids(texts, target.built.loaded.vocab_size)
    drafts = []
    for name in config.draft_models:
        progress(f"loading {name}")
        drafts.append(load("draft", name, config, longest, clock))
        check_pair(target, drafts[-1])
    drafters: list[MeasuredDrafter] = [*drafts]
    for name in config.drafters:
        progress(f"making the drafter {name}")
        tables = DraftConfig(model=config.target_model, corpus=config.corpus)
        drafters.append(make_drafter(name, target.built, tables, clock))
    measurement = Measurement(target, drafters)
    progress("warming up")
    with torch.inference_mode():
        measurement.warm_up(min(texts, key=lambda text: len(text.prompt)))
        for temperature in config.temperature:
            samplings = [config.sampling(temperature, number) for number in range(len(texts))]
            measurement.run(texts, samplings, progress)
    progress("computing the figures")
    found = measurement.found
    steps = next(iter(found.times.values())).target
    if not steps:
        raise InvalidArgumentError("prompts", "the target ends every text at once, so no step was timed")
    costs = {
        each.name: DrafterCost.of(
            found.times[each.name],
            each.operations / target.operations,
            each.weight_bytes / target.weight_bytes,
        )
        for each in drafters
    }
    kinds = [kind for kind in dict.fromkeys(text.kind for text in texts) if kind not in ("", ALL_KINDS)]
    return MeasureRecord(
        config=config,
        machine=Machine.here(),
        target=target.facts,
        drafts=tuple(draft.facts for draft in drafts),
        target_step_seconds=statistics.median(steps),
        costs=costs,
        rows=tuple(measured_rows(found, costs, kinds, config.max_k)),
        seconds=time.perf_counter() - begun,
    )


def _texts(config: MeasureConfig, prompts: Sequence[PromptLine]) -> list[PromptText]:
    tokenizer = load_tokenizer(config.target_model, "target_model")
    texts = []
    for number, line in enumerate(prompts, 1):
        ids = tuple(tokenizer.encode(line.prompt).ids) if isinstance(line.prompt, str) else line.prompt
        if not ids:
            raise InvalidArgumentError("prompts", f"prompt {number} has no tokens")
        texts.append(PromptText(line.kind or "", ids, line.max_tokens or config.max_tokens))
    return texts


def _check_ids(texts: Sequence[PromptText], vocab_size: int) -> None:
    for number, text in enumerate(texts, 1):
        if max(text.prompt) >= vocab_size:
            raise InvalidArgumentError(
                "prompts", f"prompt {number}: token id {max(text.prompt)} is not below {vocab_size}"
            )
