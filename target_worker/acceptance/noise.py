"""The random numbers of the rounds that are judged together, by purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.decoding.noise import CoupledNoise, Purpose, uniforms
from target_worker.acceptance.items import VerifyItem


@dataclass(frozen=True, slots=True)
class RoundNoise:
    """Computed when a rule asks for it. paceline/decoding/noise.py says what belongs to which position."""

    items: Sequence[VerifyItem]

    def coupled(self) -> list[CoupledNoise | None]:
        """The noise that draft and target share, one entry a row; None for a row at temperature 0."""
        return [
            None if item.params.sampling.greedy else CoupledNoise(item.seed, len(item.ledger) + depth)
            for item in self.items
            for depth in item.depths
        ]

    def uniforms(self, purpose: Purpose, count: int) -> Tensor:
        """float64 [S, count] on the host, uniform in (0, 1): `count` numbers for each round."""
        seeds = [item.seed for item in self.items]
        # Keyed by the round, not by the token.
        return uniforms(seeds, [len(item.ledger) for item in self.items], purpose, count)
