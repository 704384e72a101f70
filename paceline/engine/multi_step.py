"""Chains of draft tokens that a runner draws without returning each step's logits."""

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
    """How to draw the tokens of a chain whose distributions the target needs."""

    uniforms: npt.NDArray[np.float64]
    """[steps], in (0, 1)."""
    mass: float
    """Share of the probability mass that the kept tokens must reach."""
    bound: int
    """Maximum number of tokens in a distribution, at least 1."""


@dataclass(frozen=True, slots=True)
class ChainInput:
    """Feed `token_ids` at `end`, then choose `steps` tokens; all but the last are fed.

    Each step takes the token with the highest logit / temperature + noise, or at temperature 0 the highest
    logit; the lowest id among equals. With `draws`, it draws (`draw_support`) instead.
    """

    end: BlockTable | Branch
    """The table or branch that the tokens are appended to."""
    token_ids: Sequence[int]
    steps: int
    temperature: float = 0.0
    noise: CoupledNoise | None = None
    """Noise from its first token on; None at temperature 0 and with `draws`."""
    draws: SparseDraws | None = None
    num_others: int = 0
    """Number of next best tokens to report at each step, with the margin."""

    @property
    def room(self) -> int:
        """Maximum number of entries that it writes."""
        return len(self.token_ids) + self.steps - 1

    def entries(self, chain: Chain) -> int:
        """Number of entries that remain for `chain`; none if it is empty."""
        return len(self.token_ids) + len(chain.token_ids) - 1 if chain.token_ids else 0


@dataclass(frozen=True, slots=True)
class Chain:
    """The result of a ChainInput."""

    token_ids: Sequence[int]
    """Fewer than its steps if logits were not numbers. If the chain was cancelled, fewer as well, but at
    least one."""
    distributions: Sequence[SparseDistribution] = ()
    """The distribution of every token with `draws`, else none."""
    others: Sequence[tuple[int, ...]] = ()
    """The next best tokens at every token, best first, if requested."""
    margins: Sequence[float] = ()
    """Score of every token minus that of the best other token, if others are requested. Negative for a drawn
    token that is not the best."""


@dataclass(frozen=True, slots=True)
class ChainSkills:
    """Optional abilities of a runner's chains."""

    max_feed: int
    """Maximum tokens that a chain may begin with."""
    row_by_row: bool = False
    """True if each row adds to the time of a step."""
