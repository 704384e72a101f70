"""Chains of draft tokens: recorded against drawn one by one, and their time over the bandwidth floor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.decoding.coupled import ranked
from paceline.decoding.noise import CoupledNoise
from paceline.engine.layout import SequenceInput
from paceline.engine.multi_step import ChainInput
from paceline.engine.runner import ModelRunner
from paceline.kv import BlockTable
from tools.gpu_check.checks.machine import bandwidth
from tools.gpu_check.models import Runners, runners_of_cells, tables_of
from tools.gpu_check.report import Failed, Figures, Skipped
from tools.gpu_check.running import Bench, Case, Check
from tools.gpu_check.sizes import K

_FIRST = 5
"""The token that each chain begins with."""
_TEMPERATURE = 0.8


def _cases(bench: Bench) -> Iterator[Case]:
    sizes = bench.sizes
    runners = runners_of_cells(bench.device, sizes, sizes.small)
    for keys, count, others in itertools.product(sizes.keys, sizes.sequences, (0, 8)):
        name = f"{sizes.small.name}, {count} x {keys}, {K} tokens{f', {others} others' * bool(others)}"
        yield name, _Cell(bench, runners, count, keys, others)


@dataclass(frozen=True, slots=True)
class _Cell:
    """Chains of one shape."""

    bench: Bench
    runners: Runners
    count: int
    keys: int
    others: int

    def __call__(self) -> Figures:
        """The chain's time, and its tokens against those of single passes."""
        runners, device = self.runners, self.bench.device
        recorded = runners.recording(device.new_recorder())
        if recorded.runner.chain_skills is None:
            raise Skipped("this model's chains are drawn token by token")
        tables = tables_of(runners.launched, self.count, self.keys, K)
        try:

            def draw() -> list[tuple[int, ...]]:
                return self._drawn(recorded.runner, tables)

            draw()  # draws nothing: a shape is recorded at its second use
            recording = device.seconds(draw, 1)
            tokens = draw()
            if not recorded.captured.usable:
                raise Failed("the chain cannot be recorded; the log says why")
            if not tokens[0]:
                return {"recorded": "fits no bucket"}
            seconds = device.seconds(draw, max(1, self.bench.sizes.repeats // 2))
            single = self._by_passes(tables)
            entries = self.count * (self.keys + K) * runners.entry_bytes
            floor = K * (runners.launched.backend.weight_bytes + entries) / bandwidth(device)
            equal = sum(
                a == b
                for own, other in zip(tokens, single, strict=True)
                for a, b in zip(own, other, strict=True)
            )
            figures = {
                "floor_ms": 1e3 * floor,
                "chain_ms": 1e3 * seconds,
                "chain_over_floor": seconds / floor,
                "chain_waits": device.waits(draw),
                "recording_seconds": recording,
                "equal_tokens": equal,
                "tokens": self.count * K,
            }
            # In 16 bits a near-tie may go the other way, and the tokens behind it with it.
            if equal < 0.8 * self.count * K:
                raise Failed("recorded chains have other tokens than single passes", figures)
            return figures
        finally:
            for table in tables:
                table.free()

    def _drawn(self, runner: ModelRunner, tables: Sequence[BlockTable]) -> list[tuple[int, ...]]:
        chains = runner.forward_chains(
            [
                ChainInput(table, [_FIRST], K, _TEMPERATURE, self._noise(i), num_others=self.others)
                for i, table in enumerate(tables)
            ]
        )
        for table in tables:
            table.truncate_to(self.keys)
        return [tuple(chain.token_ids) for chain in chains]

    def _noise(self, number: int) -> CoupledNoise:
        return CoupledNoise(100 + number, self.keys + 1)

    def _by_passes(self, tables: Sequence[BlockTable]) -> list[tuple[int, ...]]:
        """The same tokens, each chosen from the logits of a pass of its own."""
        tokens = [[_FIRST] for _ in tables]
        for step in range(K):
            fed = [SequenceInput(table, own[-1:], 1) for table, own in zip(tables, tokens, strict=True)]
            scores = self.runners.launched.forward(fed) / _TEMPERATURE
            noise = [self._noise(i).after(step) for i in range(len(tables))]
            for own, best in zip(tokens, ranked(scores, noise, 1), strict=True):
                own.append(best[0][0])
        for table in tables:
            table.truncate_to(self.keys)
        return [tuple(own[1:]) for own in tokens]


CHECK = Check("chains", "recorded chains of draft tokens of the 1B shape", _cases, minutes=1.0)
