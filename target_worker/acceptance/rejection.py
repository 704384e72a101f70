"""Rejection sampling: each draft token is accepted with probability min(1, p/q) (Leviathan et al. 2023)."""

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
    tests = sparse_acceptance.accept_rejection, acceptance.accept_rejection
    return judge_by_ratios(items, scores, noise, *tests)


REJECTION = AcceptanceRule(judge)
