"""Drawing draft tokens together with their sparse distributions."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from paceline.core.types import SparseDistribution
from paceline.decoding.cpu.distributions import draw_rows
from paceline.decoding.sampling import draw, to_sparse, truncate_support, wire_form
from paceline.decoding.transfer import to_device, to_host


def draw_in_tensors(
    scores: Tensor, u: Tensor, mass: float, bound: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`draw_sparse` on a device, which it neither waits for nor copies to. `u` is on the device.

    Returns:
        The tokens, int64 [R]; then ids int64 and probabilities float32 [R, min(bound, V)], and lengths
        int64 [R], as `truncate_support` gives them.
    """
    ids, probabilities, lengths, _ = truncate_support(scores.softmax(-1), mass, bound)
    column = draw(probabilities, u)
    return ids.gather(1, column[:, None])[:, 0], ids, probabilities, lengths


def draw_sparse(
    scores: Tensor, u: Tensor, mass: float, bound: int
) -> tuple[list[int], list[SparseDistribution]]:
    """Draw one token per row, each from exactly the returned distribution.

    On a CPU, a row whose tokens are all equally likely is not truncated: its distribution has a closed form.

    Args:
        scores: float32 [R, V], logits at the request's temperature, -inf for filtered tokens.
        u: float64 [R], on the CPU, uniform in (0, 1).
        mass: probability mass that each truncated support must reach, in (0, 1].
        bound: most tokens per row.

    Returns:
        R tokens and R distributions; both are invalid for a row that is not a distribution.
    """
    if scores.device.type != "cpu":
        drawn, *support = to_host(draw_in_tensors(scores, to_device(u, scores.device), mass, bound))
        return drawn.tolist(), to_sparse(*support)
    rows, size = len(scores), min(bound, scores.shape[1])
    supports = np.empty((rows, size), dtype=np.uint32), np.empty((rows, size), dtype=np.float32)
    found = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.int64)
    draw_rows(scores.contiguous().numpy(), mass, size, u.numpy(), *supports, *found)
    tokens, sent = found[1].tolist(), wire_form(*supports, found[0].tolist())
    for row in _uniform_rows(scores, bound):
        count = scores.shape[1]
        tokens[row] = min(int(float(u[row]) * count), count - 1)
        sent[row] = SparseDistribution(uniform_over=count)
    return tokens, sent


def _uniform_rows(scores: Tensor, bound: int) -> list[int]:
    """The rows with more than `bound` tokens whose scores are all finite and equal."""
    if not len(scores) or scores.shape[1] <= bound:
        return []
    same_ends = (scores[:, 0] == scores[:, -1]).nonzero()[:, 0].tolist()  # of a model, hardly any
    return [r for r in same_ends if scores[r].isfinite().all() and (scores[r] == scores[r, 0]).all()]
