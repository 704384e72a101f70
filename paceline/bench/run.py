"""A benchmark run from start to record."""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from paceline import assets
from paceline.bench import machine, prompts
from paceline.bench.config import BenchConfig
from paceline.bench.machine import Machine, MeasuredModel
from paceline.bench.measuring import Bench, Clients
from paceline.bench.record import BenchRecord
from paceline.bench.services import Services, serve
from paceline.bench.transformers_peer import Generate, load
from paceline.bench.workload import Prompt
from paceline.client import AsyncClient, WorkerInfo
from paceline.core.errors import InvalidArgumentError
from paceline.supervisor import Sink
from paceline.supervisor.folders import owned_folder

Progress = Callable[[str], None]
"""Receives a description of the current step."""


def run_bench(config: BenchConfig, *, sink: Sink, progress: Progress) -> BenchRecord:
    """Start the processes, load the peer, measure, stop. Raises PacelineError."""
    os.environ.setdefault(
        "TOKENIZERS_PARALLELISM", "false"
    )  # tokenizers warns if processes are forked after its use
    begun = time.perf_counter()
    prompt_ids = prompts.tokenized(config.target_model, prompts.PROMPTS[: config.num_prompts])
    progress("starting one target, two drafts and three coordinators")
    with serve(config, prompt_ids, sink) as services:
        # asyncio turns Ctrl-C into a cancellation. A KeyboardInterrupt inside gRPC could make it hang.
        return asyncio.run(_measure(config, services, prompt_ids, progress, begun))


async def _measure(
    config: BenchConfig, services: Services, prompt_ids: list[Prompt], progress: Progress, begun: float
) -> BenchRecord:
    async with (
        AsyncClient(services.lookahead) as ahead,
        AsyncClient(services.without) as without,
        AsyncClient(services.choosing) as choosing,
    ):
        info = {w.role: w.info for w in (await ahead.status()).workers if w.info is not None}
        _check_lengths(config, prompt_ids, info["target"].max_model_len)
        progress("loading the peer")
        peers = _peers(config, info)
        progress("measuring the memory's bandwidth")
        rate = machine.read_bandwidth(info["target"].device, config.threads)
        # Garbage collection must not traverse the peer's objects while a round waits for its client.
        gc.collect()
        gc.freeze()
        try:
            cells = await Bench(config, Clients(ahead, without, choosing), peers, prompt_ids, progress).run()
        finally:
            gc.unfreeze()
    return BenchRecord(
        config=config,
        machine=Machine.here(),
        target=MeasuredModel.of(info["target"]),
        draft=MeasuredModel.of(info["draft"]),
        read_bandwidth=rate,
        prompt_lengths=tuple(len(prompt) for prompt in prompt_ids),
        cells=cells,
        seconds=time.perf_counter() - begun,
    )


def _check_lengths(config: BenchConfig, prompts: Sequence[Prompt], max_model_len: int) -> None:
    """Check the longest request before measuring, because it may come last. Raises InvalidArgumentError."""
    longest = max(map(len, prompts))
    if longest + config.longest_answer > max_model_len:
        raise InvalidArgumentError(
            "max_tokens",
            f"answers of up to {config.longest_answer} after a prompt of {longest} tokens"
            f" exceed the model's length of {max_model_len}",
        )


def _peers(config: BenchConfig, info: Mapping[str, WorkerInfo]) -> dict[str, Generate]:
    if not config.measures_peers:
        return {}
    from paceline.engine.loading.scaled import checkpoint_of  # imports torch, which peers need anyway

    with owned_folder(Path(tempfile.gettempdir())) as folder:
        checkpoints = (
            checkpoint_of(config.target_model, folder / "target"),
            assets.resolve(config.draft_model),
        )
        return load(config, checkpoints, info["target"], info["draft"])
