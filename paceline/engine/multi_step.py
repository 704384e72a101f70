"""Chains of draft tokens that a runner draws by itself, without anybody looking at a step's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.core.types import SparseDistribution
from paceline.decoding.noise import CoupledNoise
from paceline.kv import BlockTable, Branch


@dataclass(frozen=True, slots=True)
class SparseDraws:
    """How the tokens of a chain are drawn whose target has to know from what."""

    uniforms: npt.NDArray[np.float64]
    """[steps], in (0, 1)."""
    mass: float
    """Share of the mass that the fewest likeliest tokens must hold."""
    bound: int
    """The most tokens of a distribution, at least 1."""


@dataclass(frozen=True, slots=True)
class ChainInput:
    """Feed `token_ids` at `end`, then what follows them: `steps` tokens are chosen, all but the last fed.

    Each step takes the token with the highest logit / temperature + noise, at temperature 0 that with the
    highest logit; the lowest id among equals. With `draws` it draws (`draw_support`) instead.
    """

    end: BlockTable | Branch
    """What they are appended to."""
    token_ids: Sequence[int]
    steps: int
    temperature: float = 0.0
    noise: CoupledNoise | None = None
    """From its first token on; None at temperature 0 and with `draws`."""
    draws: SparseDraws | None = None
    num_others: int = 0
    """How many of the next best tokens to tell of each step, and its margin."""

    @property
    def room(self) -> int:
        """Entries it makes at most."""
        return len(self.token_ids) + self.steps - 1

    def entries(self, chain: Chain) -> int:
        """Entries there are of it once it has become `chain`: none where that is empty."""
        return len(self.token_ids) + len(chain.token_ids) - 1 if chain.token_ids else 0


@dataclass(frozen=True, slots=True)
class Chain:
    """What a runner made of a ChainInput."""

    token_ids: Sequence[int]
    """Fewer than its steps where logits were no numbers, or where it was stopped: then at least one."""
    distributions: Sequence[SparseDistribution] = ()
    """Of every token with `draws`, else none."""
    others: Sequence[tuple[int, ...]] = ()
    """Of every token the next best ones, best first, where they are asked for."""
    margins: Sequence[float] = ()
    """By how much the score of every token is above the best other one's, where others are asked for. Below 0
    for a token that was drawn although it is not the best."""


@dataclass(frozen=True, slots=True)
class ChainSkills:
    """What the chains of a runner can do besides choosing tokens and telling the next best."""

    supports: bool
    """They draw (`ChainInput.draws`)."""
    max_feed: int
    """Tokens that one may begin with."""
    row_by_row: bool = False
    """Each row adds to the time of a step."""
