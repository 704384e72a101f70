"""`python -m paceline.bench.steps`: what one step of each worker costs, without sockets and threads.

Passes of the embedded pair over 1 to 64 sequences with 1 to 9 rows each, and whole rounds of both workers'
engines, whose difference from their passes is what sampling and acceptance take. Arms alternate in short
bursts, so that a slow moment of the machine hits all of them; the figures are lower quartiles.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from draft_worker.drafter import Drafter
from paceline.core.config import DraftConfig, TargetConfig, WorkerConfig
from paceline.core.messages import CloseSequence, DraftRound, OpenSequence, SequenceFailed, VerifyRound
from paceline.core.types import (
    AcceptanceMode,
    Proposal,
    SamplingParams,
    SequenceParams,
    SparseDistribution,
)
from paceline.engine.batch import SequenceInput
from paceline.engine.build import Built, build
from paceline.engine.runner import ModelRunner
from target_worker.verifier import Verifier

Arm = Callable[[], float]
"""Runs once; returns the seconds that count."""

SHAPES = ((1, 1), (1, 2), (1, 3), (1, 5), (1, 9), (8, 1), (8, 3), (8, 5), (8, 9), (16, 5), (64, 1))
"""(sequences, rows each) of the target's passes."""
CONTEXTS = (200, 600)
"""Entries a sequence has: evenly spread over this range in a batch, the middle of it when alone."""
K = 4
BURST = 8
MODES = (
    (0.0, AcceptanceMode.COUPLED),
    (1.0, AcceptanceMode.COUPLED),
    (1.0, AcceptanceMode.REJECTION),
    (1.0, AcceptanceMode.BLOCK),
)
SUPPORT = 600
"""Tokens in the distribution of a draft token, the embedded draft's median at temperature 1."""


def pass_arm(runner: ModelRunner, sequences: int, rows: int) -> Arm:
    """One pass over sequences that stay as long as they are."""
    rng = random.Random(sequences * 100 + rows)
    shortest, longest = CONTEXTS
    tables = []
    for i in range(sequences):
        length = shortest + (longest - shortest) * (2 * i + 1) // (2 * sequences)
        table = runner.new_table()
        runner.forward([SequenceInput(table, _tokens(rng, runner, length), 0)])
        tables.append(table)
    lengths = [table.length for table in tables]
    inputs = [SequenceInput(table, _tokens(rng, runner, rows), rows) for table in tables]

    def run() -> float:
        begun = time.perf_counter()
        runner.forward(inputs)
        seconds = time.perf_counter() - begun
        for table, length in zip(tables, lengths, strict=True):
            table.truncate_to(length)
        return seconds

    return run


def _tokens(rng: random.Random, runner: ModelRunner, count: int) -> list[int]:
    return rng.choices(range(runner.vocab_size), k=count)


class _Rounds:
    """Rounds of one sequence, opened anew when it has grown too long."""

    def __init__(self, engine: Drafter | Verifier, params: SequenceParams, vocab_size: int) -> None:
        self._engine: Any = engine
        self._drafts = isinstance(engine, Drafter)
        self._params = params
        self._rng = random.Random(7)
        self._vocab_size = vocab_size
        self._epoch = self._round = 0
        self._name = f"{params.sampling.temperature} {params.mode.value}"
        self._ledger: list[int] = []
        self._tail: tuple[int, ...] = ()
        self._open()

    def _draw(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.choices(range(self._vocab_size), k=count))

    def _open(self) -> None:
        if self._ledger:
            self._engine.handle(CloseSequence(self._name, self._epoch), 0.0)
        self._epoch, self._round = self._epoch + 1, 0
        self._ledger, self._tail = list(self._draw(CONTEXTS[0])), ()
        self._engine.handle(OpenSequence(self._name, self._epoch, tuple(self._ledger), self._params), 0.0)
        self.run()

    def run(self) -> float:
        """One round: from the command to the answer."""
        if len(self._ledger) > CONTEXTS[1]:
            self._open()
        self._round += 1
        command = self._command()
        begun = time.perf_counter()
        events = [*self._engine.handle(command, begun)]
        while self._engine.has_work:
            events.extend(self._engine.step())
        seconds = time.perf_counter() - begun
        (event,) = events
        assert not isinstance(event, SequenceFailed), event
        self._after(event)
        return seconds

    def _command(self) -> DraftRound | VerifyRound:
        base = len(self._ledger)
        if self._drafts:
            return DraftRound(self._name, self._epoch, self._round, base, self._tail, K)
        return VerifyRound(self._name, self._epoch, self._round, base, self._tail, self._proposal())

    def _proposal(self) -> Proposal:
        """Any draft tokens; for a judge that needs to know, from flat distributions that hold them."""
        tokens = self._draw(K)
        if self._params.mode is AcceptanceMode.COUPLED:
            return Proposal(tokens)
        flat = np.full(SUPPORT, 1 / SUPPORT, dtype="<f4").tobytes()
        supports = [np.sort((token + np.arange(SUPPORT)) % self._vocab_size) for token in tokens]
        sent = [SparseDistribution(ids.astype("<u4").tobytes(), flat) for ids in supports]
        return Proposal(tokens, distributions=tuple(sent))

    def _after(self, event: object) -> None:
        """A draft's ledger grows by what a target might have said, a target's by its own verdict."""
        verdict = getattr(event, "verdict", None)
        self._tail = self._draw(2) if verdict is None else ()
        self._ledger.extend(self._tail if verdict is None else verdict.token_ids)


def configs(threads: int) -> tuple[TargetConfig, DraftConfig]:
    """Of workers that compute nothing ahead: what a round takes is all in it, and nothing of the next one."""
    return (
        TargetConfig(model="embedded:target", threads=threads, num_blocks=4096, pre_verify=False),
        DraftConfig(model="embedded:draft", threads=threads, num_blocks=2048, lookahead_branches=0),
    )


def arms(
    target: Built, draft: Built, target_config: TargetConfig, draft_config: DraftConfig
) -> dict[str, Arm]:
    """Everything that is measured, by name."""
    workers: list[tuple[Built, Any, WorkerConfig, str]] = [
        (draft, Drafter, draft_config, "drafting"),
        (target, Verifier, target_config, "verifying"),
    ]
    found: dict[str, Arm] = {}
    for sequences, rows in SHAPES:
        found[f"target, {_shape(sequences, rows)}"] = pass_arm(target.runner, sequences, rows)
    for sequences in (1, 8):
        found[f"draft, {_shape(sequences, 1)}"] = pass_arm(draft.runner, sequences, 1)
    for temperature, mode in MODES:
        sampling = SamplingParams(temperature=temperature, seed=3, max_tokens=None)
        params = SequenceParams(sampling, mode, CONTEXTS[0])
        label = "temperature 0" if sampling.greedy else f"temperature {temperature:g}, {mode.value}"
        for built, kind, config, what in workers:
            engine = kind(
                built.runner,
                config,
                vocabulary_size=built.loaded.vocab_size,
                max_model_len=built.max_model_len,
            )
            found[f"{what}, K = {K}, {label}"] = _Rounds(engine, params, built.loaded.vocab_size).run
    return found


def _shape(sequences: int, rows: int) -> str:
    plural = "row" if rows == 1 else "rows"
    return f"{rows} {plural}" if sequences == 1 else f"{sequences} x {rows} {plural}"


def measure(found: dict[str, Arm], seconds: float) -> dict[str, float]:
    """Lower quartile of each arm, in milliseconds, from as many bursts as fit into `seconds`."""
    times: dict[str, list[float]] = {name: [] for name in found}
    for arm in found.values():
        arm()
    gc.collect()
    gc.freeze()
    until = time.perf_counter() + seconds
    while True:
        for name, arm in found.items():
            burst = [arm() for _ in range(BURST)]
            # The first runs find the processor's caches full of another arm's weights.
            times[name].extend(burst[BURST // 2 :])
        if time.perf_counter() >= until:
            break
    gc.unfreeze()
    return {name: 1e3 * sorted(values)[len(values) // 4] for name, values in times.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m paceline.bench.steps", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to measure")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args(argv)
    target_config, draft_config = configs(arguments.threads)
    target, draft = build(target_config), build(draft_config)
    results = measure(arms(target, draft, target_config, draft_config), arguments.seconds)
    print(f"torch {torch.__version__}, {arguments.threads} thread(s)\n\n| | ms |\n|---|---|")
    for name, value in results.items():
        print(f"| {name} | {value:.2f} |")


if __name__ == "__main__":
    main()
