"""Chains of draft tokens that a runner draws by itself, without anybody looking at a step's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.core.types import SparseDistribution
from paceline.decoding.noise_memo import CoupledNoise
from paceline.kv import BlockTable


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
    """Feed `token_id` at the end of `table`, then what follows it, `steps` tokens in all.

    Each step takes the token with the highest logit / temperature + noise, at temperature 0 that with the
    highest logit; the lowest id among equals. With `draws` it draws (`draw_support`) instead.
    """

    table: BlockTable
    token_id: int
    steps: int
    temperature: float = 0.0
    noise: CoupledNoise | None = None
    """Of as many tokens as it has steps; None at temperature 0 and with `draws`."""
    draws: SparseDraws | None = None
    num_others: int = 0
    """How many of the next best tokens to tell of each step."""


@dataclass(frozen=True, slots=True)
class Chain:
    """What a runner made of a ChainInput."""

    token_ids: Sequence[int]
    """Fewer than its steps where logits were no numbers."""
    distributions: Sequence[SparseDistribution] = ()
    """Of every token with `draws`, else none."""
    others: Sequence[tuple[int, ...]] = ()
    """Of every token the next best ones, best first, where they are asked for."""


@dataclass(frozen=True, slots=True)
class ChainSkills:
    """What the chains of a runner can do besides choosing with and without noise."""

    supports: bool
    """They draw (`ChainInput.draws`)."""
    ranks: bool
    """They tell the next best tokens (`ChainInput.num_others`)."""
