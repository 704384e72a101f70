"""Acceptance of a batch of draft chains: the number of accepted tokens and the next token.

Every function preserves the target's distribution. p is the target's distribution, q the distribution that
the draft tokens were drawn from. Shapes: S sequences, K the longest chain, V the vocabulary. Shorter chains
are padded, `num_draft` holds their lengths, and padding is ignored. Row i of p is the distribution after i
draft tokens: it verifies draft token i, or gives the bonus token if i is the chain's length.

On a CPU, sparse_acceptance.py does the same without a dense q.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.decoding.cpu.distributions import RESIDUAL_FLOOR
from paceline.decoding.sampling import draw


@dataclass(frozen=True, slots=True)
class Decision:
    """The decisions on S proposals."""

    path: Tensor
    """int64 [S, K]: indices of the accepted draft tokens (nodes of a tree) in order, -1 beyond."""
    num_accepted: Tensor
    """int64 [S]."""
    next_token: Tensor
    """int64 [S]: the bonus, or the correction."""
    is_bonus: Tensor
    """bool [S]: no draft token was rejected (also true for an empty proposal)."""


def accept_rejection(
    draft: Tensor, num_draft: Tensor, p: Tensor, q: Tensor, accept_u: Tensor, next_u: Tensor
) -> Decision:
    """Accept token by token with probability min(1, p/q) (Leviathan et al. 2023, algorithm 1).

    The correction is drawn from norm(max(0, p - q)), the bonus from p.

    Args:
        draft: int64 [S, K].
        num_draft: int64 [S].
        p: float [S, K+1, V], rows sum to 1.
        q: float [S, K, V], rows sum to 1; one-hot for a deterministic drafter.
        accept_u: float64 [S, K], uniform in (0, 1).
        next_u: float64 [S], uniform in (0, 1).
    """
    passed = accept_u < _ratios(draft, p, q)
    accepted = _leading(passed & _within(draft, num_draft))
    scale = torch.ones(len(draft), dtype=torch.float64, device=p.device)
    next_token = draw(_next_weights(num_draft, accepted, p, q, scale), next_u)
    return _decision(draft, num_draft, accepted, next_token)


def accept_block(
    draft: Tensor, num_draft: Tensor, p: Tensor, q: Tensor, accept_u: Tensor, next_u: Tensor
) -> Decision:
    """Block verification (Sun et al. 2024, "Block verification accelerates speculative decoding").

    Accepts at least as many tokens in expectation as `accept_rejection`, with the same arguments. All tests
    are evaluated, so `accept_u` must be new in every round (see noise.py).
    """
    num_steps = draft.shape[1]
    ratios = _ratios(draft, p, q).nan_to_num(nan=0.0)
    pi = torch.ones(len(draft), num_steps + 1, dtype=torch.float64, device=p.device)
    threshold = torch.zeros(len(draft), num_steps, dtype=torch.float64, device=p.device)
    for i in range(1, num_steps + 1):
        pi[:, i] = (pi[:, i - 1] * ratios[:, i - 1]).clamp(max=1.0)
        if i == num_steps:
            threshold[:, i - 1] = pi[:, i]
            continue
        residual = (pi[:, i, None] * p[:, i].double() - q[:, i].double()).clamp_(min=0.0).sum(1)
        denominator = residual + 1.0 - pi[:, i]
        partial = torch.where(denominator > 0, residual / denominator, 1.0)
        # p is NaN if no token may follow: treat as the end of the chain.
        partial = torch.where(residual.isnan(), pi[:, i], partial)
        threshold[:, i - 1] = torch.where(num_draft == i, pi[:, i], partial)
    accepted = _largest((accept_u <= threshold) & _within(draft, num_draft))
    scale = pi.gather(1, accepted[:, None])[:, 0]
    next_token = draw(_next_weights(num_draft, accepted, p, q, scale), next_u)
    return _decision(draft, num_draft, accepted, next_token)


def _within(draft: Tensor, num_draft: Tensor) -> Tensor:
    """bool [S, K]: true for draft tokens, false for padding."""
    return torch.arange(draft.shape[1], device=draft.device) < num_draft[:, None]


def _leading(passed: Tensor) -> Tensor:
    """int64 [S]: number of passed tests before the first failure."""
    return passed.to(torch.int64).cumprod(1).sum(1)


def _largest(passed: Tensor) -> Tensor:
    """int64 [S]: number (from 1) of the last passed test, 0 if none."""
    if passed.shape[1] == 0:
        return passed.sum(1)
    return (passed * torch.arange(1, passed.shape[1] + 1, device=passed.device)).amax(1)


def _ratios(draft: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """float64 [S, K]: p/q of each draft token; NaN if both are 0, so that the test fails."""
    index = draft.clamp(min=0)[:, :, None]
    return (p[:, : draft.shape[1]].gather(2, index).double() / q.gather(2, index).double())[:, :, 0]


def _next_weights(num_draft: Tensor, accepted: Tensor, p: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    """float64 [S, V]: max(0, scale * p - q) at the first rejected token, p after a fully accepted chain."""
    rows = torch.arange(len(p), device=p.device)
    p_next = p[rows, accepted].double()
    if q.shape[1] == 0:
        return p_next
    q_next = q[rows, accepted.clamp(max=q.shape[1] - 1)].double()
    residual = (scale[:, None] * p_next - q_next).clamp_(min=0.0)
    corrected = (accepted < num_draft) & (residual.sum(1) > RESIDUAL_FLOOR)
    return torch.where(corrected[:, None], residual, p_next)


def _decision(draft: Tensor, num_draft: Tensor, accepted: Tensor, next_token: Tensor) -> Decision:
    steps = torch.arange(draft.shape[1], device=draft.device)
    path = torch.where(steps < accepted[:, None], steps, -1)
    return Decision(path, accepted, next_token, accepted == num_draft)
