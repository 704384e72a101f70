"""Rejection sampling: each draft token is accepted with probability min(1, p/q) (Leviathan et al. 2023).

In a tree, the tries after a node are judged one after the other, each with what those before it have left of
p (Miao et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from paceline.decoding import acceptance, sparse_acceptance
from target_worker.acceptance.grouping import judge_by_kind
from target_worker.acceptance.interface import AcceptanceRule, Pending
from target_worker.acceptance.items import VerifyItem
from target_worker.acceptance.noise import RoundNoise
from target_worker.acceptance.ratios import judge_by_ratios
from target_worker.acceptance.tree_ratios import judge_trees


def judge(items: Sequence[VerifyItem], scores: Tensor, noise: RoundNoise) -> Pending:
    """Judge rounds by p/q."""
    if not any(item.proposal.is_tree for item in items):
        return _judge_chains(items, scores, noise)

    def judge_kind(is_tree: bool, group: Sequence[VerifyItem], rows: Tensor) -> Pending:
        return (judge_trees if is_tree else _judge_chains)(group, rows, replace(noise, items=group))

    return judge_by_kind(items, scores, lambda item: item.proposal.is_tree, judge_kind)


def _judge_chains(items: Sequence[VerifyItem], scores: Tensor, noise: RoundNoise) -> Pending:
    tests = sparse_acceptance.accept_rejection, acceptance.accept_rejection
    return judge_by_ratios(items, scores, noise, *tests)


REJECTION = AcceptanceRule(judge)
