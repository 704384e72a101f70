"""An acceptance rule that rejects every draft token: the next token is the target's own choice."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.core.types import AcceptanceMode
from paceline.decoding.coupled import coupled_choice
from target_worker.acceptance.interface import AcceptanceRule, Pending, outcomes_of
from target_worker.acceptance.items import VerifyItem, starts_of
from target_worker.acceptance.noise import RoundNoise
from target_worker.acceptance.registry import RULES


def judge(items: Sequence[VerifyItem], scores: Tensor, noise: RoundNoise) -> Pending:
    first, own = starts_of(items), noise.coupled()
    choices = coupled_choice(scores[first], [own[row] for row in first])
    return Pending(choices, lambda tokens: outcomes_of((0, token) for token in tokens))


def register() -> None:
    RULES[AcceptanceMode.COUPLED] = AcceptanceRule(judge)
