"""What may follow the nodes of draft trees, from the drafter's logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from draft_worker.sampling.draw import DrawStep, has_mass, noise_of, scores_after
from draft_worker.sampling.growth import NextToken
from paceline.core.types import SparseDistribution
from paceline.decoding.coupled import log_normalizers, ranked, ranked_in_tensors, ranks_of
from paceline.decoding.sampling import to_sparse, truncate_support
from paceline.decoding.support import draw_sparse
from paceline.decoding.transfer import to_host
from paceline.engine.scheduling.passes import broken_rows, row_checks, usable_rows


def rank_children(
    steps: Sequence[DrawStep],
    logits: Tensor,
    allowed: Tensor,
    width: int,
    eos_token_ids: Sequence[int] = (),
) -> list[list[NextToken] | None]:
    """The best `width` tokens after every node by score + noise, best first.

    Args:
        steps: one per node, of requests whose target decides every token.
        logits: float [S, V], the draft's logits after each node.
        allowed: the same with -inf for what the requests' grammars forbid; `logits` itself without any.
        width: most tokens of a node. Fewer are returned where fewer are permitted.
        eos_token_ids: the model's end-of-sequence ids, needed for `min_tokens`.

    Returns:
        S lists; None where the logits are no distribution, or permit no token.
    """
    scores, noise = scores_after(steps, allowed, eos_token_ids), list(map(noise_of, steps))
    totals = log_normalizers(scores, noise)
    if scores.device.type == "cpu":
        ranks, sums, broken = ranked(scores, noise, width), totals.tolist(), broken_rows(logits)
    else:
        told = to_host([*row_checks(logits), totals, *ranked_in_tensors(scores, noise, width)])
        largest, row_sums, totals, *best = told
        ranks, sums = ranks_of(*best), totals.tolist()
        broken = [not usable for usable in usable_rows(largest, row_sums)]
    rows = map(_children, ranks, sums)
    return [None if bad else row or None for row, bad in zip(rows, broken, strict=True)]


def _children(row: Sequence[tuple[int, float]], total: float) -> list[NextToken]:
    """The tokens of one row. A share is at most 1, whatever the rounding."""
    return [NextToken(token, min(0.0, value - total)) for token, value in row if value > -math.inf]


def supports_of(
    steps: Sequence[DrawStep],
    logits: Tensor,
    allowed: Tensor,
    mass: float,
    bound: int,
    eos_token_ids: Sequence[int] = (),
) -> list[SparseDistribution | None]:
    """What the children of every node are drawn from.

    Arguments as for `rank_children`, of requests whose target judges by ratios; `mass` and `bound` as for
    `draw_sparse`. None where the logits are no distribution, or permit no token.
    """
    scores = scores_after(steps, allowed, eos_token_ids)
    if scores.device.type == "cpu":
        found = draw_sparse(scores, torch.full((len(steps),), 0.5, dtype=torch.float64), mass, bound)[1]
        broken = broken_rows(logits)
    else:
        ids, probabilities, lengths, _ = truncate_support(scores.softmax(-1), mass, bound)
        largest, sums, *told = to_host([*row_checks(logits), ids, probabilities, lengths])
        found, broken = to_sparse(*told), [not usable for usable in usable_rows(largest, sums)]
    return [None if bad or not has_mass(q) else q for q, bad in zip(found, broken, strict=True)]
