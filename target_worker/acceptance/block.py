"""Block verification: the chain is judged as a whole (Sun et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.decoding import acceptance, sparse_acceptance
from target_worker.acceptance.interface import AcceptanceRule, Pending
from target_worker.acceptance.items import VerifyItem
from target_worker.acceptance.noise import RoundNoise
from target_worker.acceptance.ratios import judge_by_ratios


def judge(items: Sequence[VerifyItem], scores: Tensor, noise: RoundNoise) -> Pending:
    """Judge rounds by p/q."""
    tests = sparse_acceptance.accept_block, acceptance.accept_block
    return judge_by_ratios(items, scores, noise, *tests)


BLOCK = AcceptanceRule(judge)
