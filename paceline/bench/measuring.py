"""Runs the arms in turns and collects their measurements in cells."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.bench.arms import Arm, paceline_arms, rotated
from paceline.bench.cells import Cell, Cells
from paceline.bench.config import BenchConfig
from paceline.bench.transformers_peer import Generate
from paceline.bench.workload import LoadResult, Prompt, Workload, run_load, workloads
from paceline.client import AsyncClient, SpeculationParams
from paceline.core.validation import AUTO

_WARM_UP_TOKENS = 16
_LEARNING_RUNS = 4  # unmeasured runs at several requests at a time: the service explores a new load first
_SEEDS_A_RUN = 1_000_000


@dataclass(frozen=True, slots=True)
class Clients:
    """Clients of the coordinators, named as in `Services`."""

    lookahead: AsyncClient
    without: AsyncClient
    choosing: AsyncClient

    def of(self, arm: Arm) -> AsyncClient:
        """The client for an arm."""
        if arm.k == AUTO:
            return self.choosing
        return self.lookahead if arm.lookahead else self.without


class Bench:
    """Runs all arms on all workloads. Arms take turns within a workload, each time starting with another."""

    def __init__(
        self,
        config: BenchConfig,
        clients: Clients,
        peers: Mapping[str, Generate],
        prompts: Sequence[Prompt],
        progress: Callable[[str], None],
    ) -> None:
        self._config = config
        self._clients = clients
        self._peers = {Arm(name): generate for name, generate in peers.items()}
        self._prompts = prompts
        self._progress = progress

    async def run(self) -> Cells:
        """Measure everything. Raises PacelineError."""
        return {
            (cell.arm, cell.temperature, cell.concurrency): cell
            for concurrency in self._config.concurrency
            for cell in await self._at(concurrency)
        }

    async def _at(self, concurrency: int) -> list[Cell]:
        config = self._config
        arms = [*paceline_arms(config, concurrency), *(self._peers if concurrency == 1 else ())]
        loads = workloads(self._prompts, concurrency)
        cells = {(arm, t): Cell(arm, t, concurrency) for t in config.temperature for arm in arms}
        self._progress(f"{concurrency} at a time: warming up {len(arms)} arms")
        for arm, temperature in cells:
            if not arm.is_peer or temperature == config.temperature[0]:
                most = min(_WARM_UP_TOKENS, config.max_tokens)
                await self._once(arm, loads[0], temperature, seed=0, max_tokens=most)
        await self._learn([cell for cell in cells if cell[0].k == AUTO], loads)
        for repeat in range(config.repeats):
            # Peers run once: they are several times slower, and would dominate the time of every repeat.
            present = [arm for arm in arms if not repeat or not arm.is_peer]
            for number, load in enumerate(loads):
                self._progress(
                    f"{concurrency} at a time: repeat {repeat + 1} of {config.repeats}, "
                    f"workload {number + 1} of {len(loads)}"
                )
                turn = repeat * len(loads) + number
                # Seeds below the first stride are reserved for warm-up.
                seed = (1 + turn) * _SEEDS_A_RUN
                for temperature in config.temperature:
                    for arm in rotated(present, by=turn):
                        await self._measure(cells[arm, temperature], load, (repeat, number), seed)
        return list(cells.values())

    async def _learn(self, chosen: Sequence[tuple[Arm, float]], loads: Sequence[Workload]) -> None:
        """Unmeasured runs in which a service with automatic K learns the costs of rounds."""
        runs = _LEARNING_RUNS if loads[0].concurrency > 1 else 1
        for load in [*loads] * runs:
            for arm, temperature in chosen:
                await self._once(arm, load, temperature, seed=0, max_tokens=self._config.max_tokens)

    async def _measure(self, cell: Cell, load: Workload, place: tuple[int, int], seed: int) -> None:
        """Measure one run; at concurrency 1, Paceline's arms first run the request with one token."""
        arm, temperature = cell.arm, cell.temperature
        if cell.concurrency == 1 and not arm.is_peer:
            opening = await self._once(arm, load, temperature, seed=seed, max_tokens=1)
            for result in opening.results:
                cell.opening.add(result)
        outcome = await self._once(arm, load, temperature, seed=seed, max_tokens=self._config.max_tokens)
        cell.rates[place] = outcome.tokens_per_second
        if outcome.decode_tokens_per_second is not None:
            cell.decode_rates[place] = outcome.decode_tokens_per_second
        cell.client_cpu.append(outcome.client_cpu)
        for result in outcome.results:
            cell.counts.add(result)

    async def _once(
        self, arm: Arm, load: Workload, temperature: float, *, seed: int, max_tokens: int
    ) -> LoadResult:
        if arm.is_peer:
            return self._peer_once(arm, load, temperature, seed, max_tokens)
        speculation = SpeculationParams(
            num_speculative_tokens=arm.k,
            acceptance=self._config.acceptance,
            prompt_lookup=arm.prompt_lookup,
            tree_width=arm.tree_width,
            max_tree_nodes=arm.max_tree_nodes,
        )
        client = self._clients.of(arm)
        return await run_load(
            client, load, speculation, temperature=temperature, max_tokens=max_tokens, seed=seed
        )

    def _peer_once(
        self, arm: Arm, load: Workload, temperature: float, seed: int, max_tokens: int
    ) -> LoadResult:
        """Run a peer, which computes in this process and blocks it."""
        ((prompt,),) = load.queues
        cpu, begun = time.process_time(), time.perf_counter()
        tokens = self._peers[arm](prompt, temperature, seed, max_tokens)
        seconds = time.perf_counter() - begun
        return LoadResult(tokens, seconds, (time.process_time() - cpu) / seconds)
