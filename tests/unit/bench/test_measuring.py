"""Requests and seeds of a benchmark's runs, without answers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, cast

import pytest

from paceline.bench import measuring
from paceline.bench.config import QUICK
from paceline.bench.measuring import Bench, Clients
from paceline.bench.workload import LoadResult, Prompt, Workload
from paceline.client import AsyncClient, SpeculationParams

PROMPTS: list[Prompt] = [(1, 2), (3,)]


async def test_measured_requests_were_not_used_in_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(QUICK, concurrency=(1, 2), repeats=2, peers=False)
    warming, seeds = True, dict[bool, Counter[tuple[Prompt, int]]]({True: Counter(), False: Counter()})

    def progress(line: str) -> None:
        nonlocal warming
        warming = "warming up" in line

    async def run_load(client: Any, load: Workload, *args: Any, seed: int, **more: Any) -> LoadResult:
        for number, queue in enumerate(load.queues):
            for turn, prompt in enumerate(queue):
                seeds[warming][prompt, seed + turn * load.concurrency + number] += 1
        return LoadResult(1, 1.0, decode_tokens_per_second=1.0)

    monkeypatch.setattr(measuring, "run_load", run_load)
    nobody = cast(AsyncClient, None)
    await Bench(config, Clients(nobody, nobody, nobody), {}, PROMPTS, progress).run()
    assert all(seeds.values())
    assert not seeds[True].keys() & seeds[False].keys()


async def test_requests_of_an_arm_ask_for_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(QUICK, max_tree_nodes=(8, 16), tree_width=3, peers=False)
    asked = set[tuple[object, ...]]()

    async def run_load(_: Any, load: Workload, speculation: SpeculationParams, **more: Any) -> LoadResult:
        asked.add((speculation.num_speculative_tokens, speculation.tree_width, speculation.max_tree_nodes))
        return LoadResult(1, 1.0)

    monkeypatch.setattr(measuring, "run_load", run_load)
    nobody = cast(AsyncClient, None)
    await Bench(config, Clients(nobody, nobody, nobody), {}, PROMPTS, lambda _: None).run()
    chains = {(k, None, None) for k in (0, 4, "auto")}
    assert asked == chains | {(4, 3, 8), (4, 3, 16)}
