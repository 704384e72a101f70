"""An artificial run whose ratios and figures can be computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.bench.arms import Arm, paceline_arms
from paceline.bench.cells import Cell, Cells, Counts
from paceline.bench.config import FULL, BenchConfig
from paceline.bench.machine import Machine, MeasuredModel
from paceline.bench.record import BenchRecord

PLAIN = 100.0
"""Tokens per second of plain decoding, one request at a time."""
SPEEDS = {
    "plain": 1.0,
    "speculative, K=4": 1.5,
    "speculative, K=2": 1.25,
    "lookahead, K=4": 2.0,
    "lookahead, K=2": 1.6,
    "tree of 16, K=4": 1.7,
    "lookahead, K=auto": 1.9,
    "as served": 2.4,
    "transformers generate": 0.8,
    "transformers assisted generation, K=4": 0.9,
    "transformers assisted generation, own schedule": 1.25,
}
"""Over plain decoding at one request; at n requests what is above 1 shrinks to its n-th part, less 0.1."""


def rate(name: str, concurrency: int) -> float:
    if name == "plain, again":
        return PLAIN * concurrency * (1 - concurrency / 100)
    speed = SPEEDS[name]
    if concurrency > 1 and name != "plain":
        speed = 1 + (speed - 1) / concurrency - 0.1
    return PLAIN * concurrency * speed


def counts(arm: Arm, tokens: int) -> Counts:
    """Half a second for the prompt and its token. Then a target step is 10 ms, K + 1 rows 15 ms, and a
    proposal 4 ms, of which lookahead shows a quarter."""
    first = Counts(requests=1, completion_tokens=1, num_rounds=1, target=0.5, total=0.5)
    if arm.k == 0:
        rounds = tokens - 1
        more = Counts(0, rounds, rounds, target=0.01 * rounds, wire=0.001 * rounds, total=0.011 * rounds)
    else:
        rounds = (tokens - 1) // 2
        draft = 0.004 * rounds * (0.25 if arm.lookahead else 1)
        more = Counts(
            completion_tokens=2 * rounds,
            num_rounds=rounds,
            num_spec_steps=rounds,
            num_draft_tokens=(arm.max_tree_nodes or (arm.k if isinstance(arm.k, int) else 4)) * rounds,
            num_accepted_draft_tokens=rounds * 3 // 4,
            num_lookahead_hits=rounds * 3 // 4 if arm.lookahead else 0,
            num_rejected_draft_tokens=rounds // 4,
            draft=draft,
            target=0.015 * rounds,
            queue=0.001 * rounds,
            wire=0.002 * rounds,
            coordinator=0.001 * rounds,
            total=draft + 0.019 * rounds,
        )
    return first - (Counts() - more) if tokens > 1 else first


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> BenchConfig:
    # Whatever this machine would do.
    monkeypatch.setattr(BenchConfig, "drafts_ahead", True)
    return replace(FULL, concurrency=(1, 2, 4), k=(4, 2), max_tree_nodes=(16,), repeats=2, num_prompts=2)


@pytest.fixture
def cells(config: BenchConfig) -> Cells:
    """Two repeats, the second on a machine half as fast."""
    peers = [Arm(name) for name in SPEEDS if name.startswith("transformers")]
    cells: dict[tuple[Arm, float, int], Cell] = {}
    for n in config.concurrency:
        for t in config.temperature:
            for arm in [*paceline_arms(config, n), *(peers if n == 1 else ())]:
                cell = Cell(arm, t, n, client_cpu=[0.3, 0.31] if arm.k == 0 else [0.25, 0.9])
                for repeat, slowness in enumerate((1, 2)):
                    cell.rates[repeat, 0] = rate(arm.name, n) / slowness
                    if n == 1 and not arm.is_peer:
                        cell.decode_rates[repeat, 0] = 1.1 * rate(arm.name, n) / slowness
                if not arm.is_peer:
                    cell.counts = counts(arm, 41)
                    cell.opening = counts(arm, 1) if n == 1 else Counts()
                cells[arm, t, n] = cell
    return cells


@pytest.fixture
def record(config: BenchConfig, cells: Cells) -> BenchRecord:
    model = MeasuredModel("embedded:target", "cpu", "A Processor", "float32", 5_000_000, 20_000_000)
    return BenchRecord(
        config=config,
        machine=Machine("A Processor", 2, None, "3.11", {"torch": "2.0"}),
        target=model,
        draft=replace(model, name="embedded:draft", num_parameters=500_000, weight_bytes=2_000_000),
        read_bandwidth=10e9,
        prompt_lengths=(12, 330),
        cells=cells,
        seconds=61.0,
    )
