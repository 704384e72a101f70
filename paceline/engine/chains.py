"""Chains of draft tokens that a runner draws by itself, without anybody looking at a step's logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.kv import BlockTable


@dataclass(frozen=True, slots=True)
class ChainInput:
    """Feed `token_id` at the end of `table`, then what follows it, `steps` tokens in all.

    Each step takes the token with the highest logit / temperature + noise, at temperature 0 that with the
    highest logit; the lowest id among equals.
    """

    table: BlockTable
    token_id: int
    steps: int
    temperature: float = 0.0
    noise: npt.NDArray[np.float64] | None = None
    """[steps, vocabulary]; None at temperature 0."""
