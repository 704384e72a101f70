"""The judgement that takes the most memory, to be measured before the cache is sized."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from paceline.core import limits
from paceline.core.types import Proposal, SamplingParams, SequenceParams, SparseDistribution
from target_worker.acceptance.items import VerifyItem
from target_worker.acceptance.registry import RULES
from target_worker.verdicts import with_logprobs
from target_worker.verify import verify_items

_K: Final = 4
_LEDGER: Final = (0, 0)
_SAMPLING: Final = SamplingParams(
    seed=0,
    temperature=0.8,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logprobs=1,
)
"""Everything that makes a copy of the logits."""


def judge_largest(logits: Tensor) -> None:
    """Judge rounds that fill all rows, by each mode. logits: float32 [R, V], any numbers."""
    # What a grammar leaves is a copy.
    allowed = logits.clone()
    point = SparseDistribution.point(0)
    for mode in RULES:
        params = SequenceParams(_SAMPLING, mode, prompt_length=1)
        for most, trees in ((_K, False), (limits.MAX_TREE_NODES, True))[: 1 + mode.facts.takes_trees]:
            items = []
            for first in range(0, len(logits), most + 1):
                k = min(most, len(logits) - first - 1)
                sent = (point,) * k if mode.facts.needs_q else ()
                # One try a node: all of them are then judged in one step.
                parents = tuple(range(-1, k - 1)) if trees else ()
                items.append(VerifyItem(params, _LEDGER, Proposal((0,) * k, parents, sent)))
            with_logprobs(items, logits, verify_items(items, logits, allowed))
