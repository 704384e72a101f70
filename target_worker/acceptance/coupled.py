"""Coupled acceptance: a draft token is accepted if the target chooses it too (Daliri et al. 2025).

The target's choice is the argmax of its scores + the noise that the draft added too. At temperature 0, where
there is no noise, every mode is judged so.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from paceline.decoding.coupled import coupled_choice
from paceline.decoding.gumbel_argmax import choose_rows
from target_worker.acceptance.interface import AcceptanceRule, Pending, RuleOutcome, outcomes_of
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
        np.array([len(item.ledger) for item in items], dtype=np.uint64),
        choices,
        usable,
    )
    sound = sound_items(items, usable.tolist())
    return [o if fine else None for o, fine in zip(_accepted(items, choices.tolist()), sound, strict=True)]


def _accepted(items: Sequence[VerifyItem], choices: Sequence[int]) -> list[RuleOutcome]:
    return outcomes_of(
        accept_coupled(item.proposal.token_ids, choices[start : start + item.rows])
        for item, start in zip(items, starts_of(items), strict=True)
    )


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
