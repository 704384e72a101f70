"""Coupled acceptance: a draft token is accepted if the target chooses it too (Daliri et al. 2025).

In a tree all children of a node are compared with the target's one choice after that node.

The target's choice is the argmax of its scores + the noise that the draft added too. At temperature 0, where
there is no noise, every mode is judged so.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from paceline.core.types import Proposal
from paceline.decoding.coupled import coupled_choice
from paceline.decoding.gumbel_argmax import choose_rows
from paceline.decoding.trees import follow
from target_worker.acceptance.interface import AcceptanceRule, Pending, RuleOutcome
from target_worker.acceptance.items import VerifyItem, sound_items, starts_of
from target_worker.acceptance.noise import RoundNoise


def judge(items: Sequence[VerifyItem], scores: Tensor, noise: RoundNoise) -> Pending:
    """Judge rounds by the target's own choices, one a row."""
    return Pending(coupled_choice(scores, noise.coupled()), lambda choices: _accepted(items, choices))


def judge_few(items: Sequence[VerifyItem], logits: Tensor) -> list[RuleOutcome | None]:
    """Judge rounds on a CPU in one compiled call."""
    samplings = [item.params.sampling for item in items]
    choices, usable = np.empty(len(logits), dtype=np.int64), np.empty(len(logits), dtype=np.bool_)
    choose_rows(
        np.ascontiguousarray(logits.numpy()),
        np.array([item.rows for item in items], dtype=np.int64),
        np.array([s.temperature or 1.0 for s in samplings], dtype=np.float32),
        np.array([not s.greedy for s in samplings], dtype=np.bool_),
        np.array([item.seed for item in items], dtype=np.uint64),
        np.array([len(item.ledger) + depth for item in items for depth in item.depths], dtype=np.uint64),
        choices,
        usable,
    )
    sound = sound_items(items, usable.tolist())
    return [o if fine else None for o, fine in zip(_accepted(items, choices.tolist()), sound, strict=True)]


def _accepted(items: Sequence[VerifyItem], choices: Sequence[int]) -> list[RuleOutcome]:
    starts = starts_of(items)
    return [_judged(item.proposal, choices[s : s + item.rows]) for item, s in zip(items, starts, strict=True)]


def _judged(proposal: Proposal, choices: Sequence[int]) -> RuleOutcome:
    """`choices`: the target's own token after each row; -1 where it has none."""
    if proposal.is_tree:
        path = follow(proposal.token_ids, proposal.parents, choices)
        last = path[-1] if path else None
        accepted, token = len(path), choices[0 if last is None else last + 1]
    else:
        (accepted, token), last = accept_coupled(proposal.token_ids, choices), None
    return RuleOutcome(accepted, token if token >= 0 else None, last)


def accept_coupled(draft: Sequence[int], choices: Sequence[int]) -> tuple[int, int]:
    """Accept draft tokens as long as they equal the target's own choices.

    Args:
        draft: one chain.
        choices: the target's own token after each prefix of the chain, one more than draft tokens.

    Returns:
        How many are accepted, and the token that follows them.
    """
    accepted = 0
    for token, choice in zip(draft, choices, strict=False):
        if token != choice:
            break
        accepted += 1
    return accepted, choices[accepted]


COUPLED = AcceptanceRule(judge, judge_few)
