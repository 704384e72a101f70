"""A made-up run whose every ratio and figure can be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from paceline.bench import arms
from paceline.bench.arms import Arm
from paceline.bench.cells import Cell, Cells, Counts
from paceline.bench.config import FULL, BenchConfig
from paceline.bench.machine import Machine, Model
from paceline.bench.peers import PeerState
from paceline.bench.record import Record
from paceline.core.types import AcceptanceMode

PLAIN = 100.0
"""Tokens per second of plain decoding, one request at a time."""
SPEEDS = {
    "plain": 1.0,
    "speculative, coupled, K=4": 1.5,
    "speculative, coupled, K=2": 1.25,
    "lookahead, coupled, K=4": 2.0,
    "lookahead, coupled, K=2": 1.6,
    "lookahead, coupled, K=auto": 1.9,
    "as served, coupled, K=auto": 2.4,
    "transformers generate": 0.8,
    "transformers assisted generation, K=4": 0.9,
    "transformers assisted generation, own schedule": 1.25,
    "transformers prompt lookup": 1.1,
}
"""Over plain decoding at one request; at n requests what is above 1 shrinks to its n-th part, less 0.1."""

CLOCKS = {"target": 0.1, "draft": 0.02, "coordinator": 0.03, "client": 0.01}
"""Processor seconds of each role before a run of two of them, which takes as much again."""


def rate(name: str, concurrency: int) -> float:
    if name == "plain, again":
        return PLAIN * concurrency * (1 - concurrency / 100)
    speed = SPEEDS[name]
    if concurrency > 1 and name != "plain":
        speed = 1 + (speed - 1) / concurrency - 0.1
    return PLAIN * concurrency * speed


def counts(arm: Arm, tokens: int, *, prompt_seconds: float) -> Counts:
    """1 target step is 10 ms, K + 1 rows 15 ms; a proposal 4 ms, of which lookahead shows a quarter."""
    if arm.k == 0:
        return Counts(
            requests=1,
            completion_tokens=tokens,
            num_rounds=tokens,
            target=0.01 * tokens + prompt_seconds,
            wire=0.001 * tokens,
            total=0.011 * tokens + prompt_seconds,
        )
    rounds = tokens // 2
    draft = 0.004 * rounds * (0.25 if arm.lookahead else 1)
    return Counts(
        requests=1,
        completion_tokens=tokens,
        num_rounds=rounds,
        num_spec_steps=rounds,
        num_draft_tokens=(arm.k if isinstance(arm.k, int) else 4) * rounds,
        num_accepted_draft_tokens=rounds * 3 // 4,
        num_lookahead_hits=rounds * 3 // 4 if arm.lookahead else 0,
        num_rejected_draft_tokens=rounds // 4,
        draft=draft + prompt_seconds / 2,
        target=0.015 * rounds + prompt_seconds,
        wire=0.003 * rounds,
        coordinator=0.001 * rounds,
        total=draft + 0.019 * rounds + 1.5 * prompt_seconds,
    )


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> BenchConfig:
    # Whatever this machine would do.
    monkeypatch.setattr(BenchConfig, "drafts_ahead", True)
    return replace(
        FULL, acceptance=(AcceptanceMode.COUPLED,), concurrency=(1, 2, 4), k=(4, 2), repeats=2, prompts=2
    )


@pytest.fixture
def all_cells(config: BenchConfig) -> list[Cell]:
    """Two repeats, the second on a machine half as fast."""
    peers = [Arm(name) for name in SPEEDS if name.startswith("transformers")]
    cells = []
    for n in config.concurrency:
        again = [arms.plain_again(config)] if n > 1 else []
        behind = config.k if n == 1 else config.k[:1]
        without = [arms.drafting(config, k, lookahead=False) for k in behind]
        ours = [*again, arms.plain(config), *without, *arms.fixed(config)[1:]]
        for t in config.temperature:
            for arm in [*ours, arms.automatic(config), arms.served(config), *(peers if n == 1 else ())]:
                cell = Cell(arm, t, n, client_cpu=[0.3, 0.31] if arm.k == 0 else [0.25, 0.9])
                for repeat, slowness in enumerate((1, 2)):
                    cell.rates[repeat, 0] = rate(arm.name, n) / slowness
                    if n == 1 and not arm.is_peer:
                        cell.decode_rates[repeat, 0] = 1.1 * rate(arm.name, n) / slowness
                if not arm.is_peer:
                    for place in cell.rates:
                        cell.took(place, CLOCKS, {role: 2 * seconds for role, seconds in CLOCKS.items()})
                    cell.counts = counts(arm, 40, prompt_seconds=0.5)
                    cell.opening = counts(arm, 8, prompt_seconds=0.5) if n == 1 else Counts()
                cells.append(cell)
    return cells


@pytest.fixture
def make_record(config: BenchConfig) -> Callable[[list[Cell]], Record]:
    def make(cells: list[Cell]) -> Record:
        model = Model("embedded:target", "cpu", "A Processor", "float32", 5_000_000, 20_000_000)
        return Record(
            config=config,
            machine=Machine("A Processor", 2, None, "32768K", "3.11", {"torch": "2.0"}),
            target=model,
            draft=replace(model, name="embedded:draft", num_parameters=500_000, weight_bytes=2_000_000),
            read_bandwidth=10e9,
            prompt_lengths=(12, 330),
            peers=(
                PeerState("transformers", "5.0"),
                PeerState("CTranslate2", None, "pip install ctranslate2"),
            ),
            cells=Cells(cells),
            seconds=61.0,
        )

    return make


@pytest.fixture
def record(make_record: Callable[[list[Cell]], Record], all_cells: list[Cell]) -> Record:
    return make_record(all_cells)
