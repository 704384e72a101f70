"""Coupled sampling: the Gumbel-max trick with noise shared by draft and target (Daliri et al. 2025).

The token at a position is the argmax of score + noise, which is a draw from the softmax of the scores. Two
models that add the same noise tend to choose the same token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.decoding.cuda.kernels import gumbel_kernels
from paceline.decoding.gumbel_argmax import best_rows
from paceline.decoding.noise import MAX_NOISE, CoupledNoise, gumbel
from paceline.decoding.transfer import to_device, to_host

Noise = Sequence[CoupledNoise | None]
"""The noise of each row; None for a greedy row."""
_NOTHING = (0, -math.inf)
Array = npt.NDArray[Any]


def coupled_choice(scores: Tensor, noise: Noise) -> Tensor:
    """The token with the highest score + noise in every row.

    Args:
        scores: float32 [R, V]: logits over temperatures, -inf for filtered tokens.
        noise: noise of the R rows.

    Returns:
        int64 [R] on the scores' device, the lowest id among equals; -1 if all tokens are filtered.
    """
    if scores.device.type == "cpu":
        tokens, values = _best_on_host(scores, noise, 1)
        return torch.from_numpy(np.where(values > -math.inf, tokens, -1)[:, 0])
    return _choice_in_tensors(scores, noise)


Ranks = list[list[tuple[int, float]]]
"""(token, score + noise) of each row, best first."""


def ranked(scores: Tensor, noise: Noise, count: int) -> Ranks:
    """The tokens with the highest score + noise in every row, and those values.

    Args:
        scores: as for `coupled_choice`, whose choice comes first.
        noise: noise of the R rows.
        count: number of tokens, at least 1.

    Returns:
        (token, value), best first; fewer than `count` if fewer are allowed, but at least one.
    """
    if scores.device.type == "cpu":
        return ranks_of(*_best_on_host(scores, noise, min(count, scores.shape[1])))
    return ranks_of(*to_host(ranked_in_tensors(scores, noise, count)))


def ranks_of(tokens: Array | Tensor, values: Array | Tensor) -> Ranks:
    """`ranked` from the tokens and values [R, count] of its rows, on the host."""
    rows = (zip(*row, strict=True) for row in zip(tokens.tolist(), values.tolist(), strict=True))
    return [[entry for entry in row if entry[1] > -math.inf] or [_NOTHING] for row in rows]


def log_normalizers(scores: Tensor, noise: Noise) -> Tensor:
    """log sum exp(score + noise) of every row: float64 [R], on the scores' device; -inf if all are filtered.

    A token's score + noise minus this is the logarithm of its likelihood of being chosen by a model that is
    about as good, with the same noise.
    """
    return add_coupled_noise(scores, noise).double().logsumexp(-1)


def add_coupled_noise(scores: Tensor, noise: Noise) -> Tensor:
    """scores + noise: float64 [R, V]; the scores themselves if no row has noise."""
    where = [(row, n.seed, n.first) for row, n in enumerate(noise) if n is not None]
    if not where:
        return scores
    kernels = gumbel_kernels(scores.device)
    if kernels is not None:
        return kernels.add_noise(scores, None, *_streams(noise, scores.device))
    sums, vocab_size = scores.to(torch.float64, copy=True), scores.shape[1]
    at_once = max(1, MAX_NOISE // vocab_size)
    for first in range(0, len(where), at_once):
        rows, seeds, positions = zip(*where[first : first + at_once], strict=True)
        made = gumbel(seeds, positions, vocab_size, scores.device)
        if rows[-1] - rows[0] + 1 == len(rows):
            # No index has to be copied to the device.
            sums[rows[0] : rows[-1] + 1].add_(made)
        else:
            sums.index_add_(0, to_device(torch.tensor(rows), scores.device), made)
    return sums


def _choice_in_tensors(scores: Tensor, noise: Noise) -> Tensor:
    kernels = gumbel_kernels(scores.device)
    if kernels is not None:
        return kernels.choose(scores, None, *_streams(noise, scores.device))[0]
    best = add_coupled_noise(scores, noise).max(-1)
    return best.indices.where(best.values > -math.inf, -1)


def _best_on_host(
    scores: Tensor, noise: Noise, count: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.floating[Any]]]:
    """Tokens and values [R, count], best first; -inf if a row has fewer."""
    rows = scores.numpy()
    if count == 1 and not any(noise):
        # numpy takes a tenth of torch's time.
        tokens = rows.argmax(-1, keepdims=True)
        return tokens, np.take_along_axis(rows, tokens, -1)
    noisy = np.array([n is not None for n in noise], dtype=np.bool_)
    seeds = np.array([0 if n is None else n.seed for n in noise], dtype=np.uint64)
    positions = np.array([0 if n is None else n.first for n in noise], dtype=np.uint64)
    values, tokens = np.empty((len(noise), count)), np.empty((len(noise), count), dtype=np.int64)
    best_rows(np.ascontiguousarray(rows), noisy, seeds, positions, values, tokens)
    return tokens, values


def _streams(noise: Noise, device: torch.device) -> Tensor:
    """int64 [3, R], in one copy: whether a row has noise, the bits of its seed, its position."""
    rows = [(0, 0, 0) if n is None else (1, n.seed, n.first) for n in noise]
    numbers = np.array(rows, dtype=np.uint64).reshape(-1, 3).T.copy()
    return to_device(torch.from_numpy(numbers.view(np.int64)), device)


def ranked_in_tensors(scores: Tensor, noise: Noise, count: int) -> tuple[Tensor, Tensor]:
    """`ranked` on a device, which it does not wait for.

    Returns:
        Tokens int64 and values float64, both [R, min(count, V)], best first; -inf if a row has fewer.
    """
    kernels = gumbel_kernels(scores.device) if count == 1 else None
    if kernels is not None:
        chosen, best = kernels.choose(scores, None, *_streams(noise, scores.device))
        return chosen[:, None], best[:, None]
    sums = add_coupled_noise(scores, noise).double()
    values, tokens = sums.topk(min(count, scores.shape[1]), dim=-1)
    # Among equals the lowest id must come first; `topk` guarantees no order.
    first = sums.argmax(-1, keepdim=True)
    others = torch.where(tokens == first, tokens[:, :1], tokens)[:, 1:]
    return torch.cat([first, others], dim=-1), values
