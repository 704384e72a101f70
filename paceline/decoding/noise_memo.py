"""Coupled noise that is kept, and made before it is asked for.

Noise belongs to a position. A round looks at positions that the one before it looked at too, and those of the
next round are known while nothing is to be done: while a draft waits for the verdict, and a target for the
next proposal. On a CPU a row of noise takes as long as a step of a small draft.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.types import AcceptanceMode, SequenceParams
from paceline.decoding.noise import gumbel

CAPACITY_BYTES = 32 * 2**20
EXPECTED = 256
"""Rows that may be expected at a time; the oldest are forgotten."""


class NoiseMemo:
    """Rows of one vocabulary on the CPU. The numbers are those of `noise.gumbel`, whoever made them when."""

    def __init__(self, vocab_size: int, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self._vocab_size = vocab_size
        self._capacity = max(1, capacity_bytes // (8 * vocab_size))
        self._rows: OrderedDict[tuple[int, int], Tensor] = OrderedDict()
        """Each float64 [V], by (seed, position), the one used longest ago first."""
        self._expected: deque[tuple[int, int]] = deque(maxlen=EXPECTED)

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Noise of N positions, float64 [N, V]: what `gumbel` gives."""
        keys = list(zip(seeds, positions, strict=True))
        missing = [key for key in keys if key not in self._rows]
        if len(missing) == len(keys):
            made = gumbel(seeds, positions, self._vocab_size)
            self._keep(keys, made)
            return made
        found = {key: self._rows[key] for key in keys if key in self._rows}
        if missing:
            made = gumbel([seed for seed, _ in missing], [at for _, at in missing], self._vocab_size)
            found.update(zip(missing, made, strict=True))
            self._keep(missing, made)
        for key in keys:
            if key in self._rows:
                self._rows.move_to_end(key)
        return torch.stack([found[key] for key in keys])

    def expect(self, params: SequenceParams, first: int, count: int) -> None:
        """`count` positions from `first` on will be asked for, if the request has noise at all."""
        if params.sampling.greedy or params.mode is not AcceptanceMode.COUPLED:
            return
        seed = params.sampling.seed
        assert seed is not None
        keys = ((seed, position) for position in range(first, first + count))
        self._expected.extend(key for key in keys if key not in self._rows)

    def prepare(self) -> bool:
        """Make one row that is expected; False when there is none left."""
        while self._expected:
            key = self._expected.popleft()
            if key not in self._rows:
                self._keep([key], gumbel([key[0]], [key[1]], self._vocab_size))
                return True
        return False

    def _keep(self, keys: Sequence[tuple[int, int]], rows: Tensor) -> None:
        """A batch that would push everything else out is not worth keeping."""
        if len(keys) > self._capacity // 2:
            return
        self._rows.update(zip(keys, rows, strict=True))
        while len(self._rows) > self._capacity:
            self._rows.popitem(last=False)


class CoupledNoise:
    """The coupled noise of consecutive positions of one request, made when somebody looks at it."""

    __slots__ = ("_rows", "count", "first", "memo", "seed")

    def __init__(self, memo: NoiseMemo, seed: int, first: int, count: int) -> None:
        """`first`: the absolute index of the token that the first of `count` rows decides."""
        self.memo = memo
        self._rows: Tensor | None = None
        self.seed = seed
        self.first = first
        self.count = count

    def rows(self) -> Tensor:
        """float64 [count, V] on the CPU."""
        if self._rows is None:
            self._rows = self.memo.rows([self.seed] * self.count, range(self.first, self.first + self.count))
        return self._rows

    def part(self, start: int, stop: int) -> CoupledNoise:
        """Rows [start, stop) of these, which may go on past their end."""
        part = CoupledNoise(self.memo, self.seed, self.first + start, stop - start)
        if self._rows is not None and stop <= self.count:
            part._rows = self._rows[start:stop]
        return part
