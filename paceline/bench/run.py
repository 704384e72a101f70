"""One run from start to record."""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline import assets
from paceline.bench import bandwidth, prompts
from paceline.bench.config import BenchConfig
from paceline.bench.machine import Machine, Model
from paceline.bench.measuring import Bench, Clients
from paceline.bench.peers import PeerArm, PeerSetup, PeerState, importing, join
from paceline.bench.processor import Processors
from paceline.bench.record import Record
from paceline.bench.services import Services, serve
from paceline.bench.workload import Prompt
from paceline.client import AsyncClient, WorkerInfo
from paceline.core.errors import InvalidArgumentError
from paceline.supervisor import Sink
from paceline.supervisor.folders import owned_folder

Progress = Callable[[str], None]
"""Told what is being done now."""


def run_bench(config: BenchConfig, *, sink: Sink, progress: Progress) -> Record:
    """Start the processes, load the peers, measure, stop. Raises PacelineError."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # we load tokenizers and then start processes
    begun = time.perf_counter()
    ahead = importing() if config.measures_peers else None
    prompt_ids = prompts.tokenized(config.target_model, prompts.PROMPTS[: config.prompts])
    progress("starting one target, two drafts and three coordinators")
    with (
        owned_folder(Path(tempfile.gettempdir())) as folder,
        serve(config, prompt_ids, sink) as services,
    ):
        if ahead is not None:
            ahead.join()
        # asyncio turns Ctrl-C into a cancellation; an exception could strike inside gRPC, which then hangs.
        return asyncio.run(_measure(config, services, prompt_ids, folder, progress, begun))


async def _measure(
    config: BenchConfig,
    services: Services,
    prompt_ids: list[Prompt],
    folder: Path,
    progress: Progress,
    begun: float,
) -> Record:
    async with (
        AsyncClient(services.lookahead) as ahead,
        AsyncClient(services.without) as without,
        AsyncClient(services.choosing) as choosing,
    ):
        info = {w.role: w.info for w in (await ahead.status()).workers if w.info is not None}
        _check_lengths(config, prompt_ids, info["target"].max_model_len)
        progress("loading the peers")
        peer_arms, states = _peers(config, info, folder)
        progress("measuring the memory's bandwidth")
        rate = bandwidth.read_bandwidth(info["target"].device, config.threads)
        # The collector must not walk through what the peers loaded while a round waits for its client.
        gc.collect()
        gc.freeze()
        try:
            clients = Clients(ahead, without, choosing)
            processors = Processors(services.pids)
            cells = await Bench(config, clients, peer_arms, prompt_ids, processors, progress).run()
        finally:
            gc.unfreeze()
    return Record(
        config=config,
        machine=Machine.here(),
        target=Model.of(info["target"]),
        draft=Model.of(info["draft"]),
        read_bandwidth=rate,
        prompt_lengths=tuple(len(prompt) for prompt in prompt_ids),
        peers=tuple(states),
        cells=cells,
        seconds=time.perf_counter() - begun,
    )


def _check_lengths(config: BenchConfig, prompts: Sequence[Prompt], max_model_len: int) -> None:
    """Before anything is measured: the longest request may be among the last ones.

    Raises InvalidArgumentError.
    """
    longest = max(map(len, prompts))
    if longest + config.longest_answer > max_model_len:
        raise InvalidArgumentError(
            "max_tokens",
            f"answers of up to {config.longest_answer} after a prompt of {longest} tokens"
            f" exceed the model's length of {max_model_len}",
        )


def _peers(
    config: BenchConfig, info: dict[str, WorkerInfo], folder: Path
) -> tuple[list[PeerArm], list[PeerState]]:
    if not config.measures_peers:
        return [], []
    from paceline.engine.scaled import checkpoint_of  # with torch, which peers need anyway

    return join(
        PeerSetup(
            target=checkpoint_of(config.target_model, folder / "target"),
            draft=assets.resolve(config.draft_model),
            device=info["target"].device,
            target_dtype=info["target"].dtype,
            draft_dtype=info["draft"].dtype,
            threads=config.threads,
            k=config.k[0],
            folder=folder,
        )
    )
