"""What the rules share that compare p, the target's distribution, with q, what a draft token was drawn from.

On a CPU the distributions are compared by their supports (paceline/decoding/sparse_acceptance.py), on other
devices as tensors (paceline/decoding/acceptance.py). Both give the same decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.decoding.acceptance import Decision
from paceline.decoding.noise import Purpose
from paceline.decoding.sampling import dense_from_sparse, point_mass
from paceline.decoding.sparse_acceptance import Floats, Indices, SparseChains
from paceline.decoding.transfer import to_device
from target_worker.acceptance.interface import Pending, on_host, outcomes_of
from target_worker.acceptance.items import VerifyItem, starts_of
from target_worker.acceptance.noise import RoundNoise

SparseTest = Callable[[SparseChains, Floats, Floats, Floats], tuple[Indices, Indices]]
"""(chains, p, accept uniforms, next uniforms) -> accepted draft tokens and next token of each chain."""
DenseTest = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Decision]
"""(draft tokens, their numbers, p, q, accept uniforms, next uniforms) -> the same in tensors."""


def judge_by_ratios(
    items: Sequence[VerifyItem], scores: Tensor, noise: RoundNoise, sparse: SparseTest, dense: DenseTest
) -> Pending:
    """Judge rounds by one of two tests that decide alike; otherwise as `Judge`."""
    p = scores.softmax(-1, dtype=torch.float64)
    longest = max(item.num_draft for item in items)
    accept_u = noise.uniforms(Purpose.ACCEPT_TEST, max(longest, 1))
    next_u = noise.uniforms(Purpose.NEXT_TOKEN, 1)[:, 0]
    if on_host(p):
        accepted, tokens = judge_sparsely(items, p, accept_u, next_u, sparse)
    else:
        accepted, tokens = judge_densely(items, p, accept_u, next_u, dense)
    # Where no token is possible, the softmax is NaN in every place.
    next_rows = to_device(torch.tensor(starts_of(items)), p.device) + accepted
    tokens = tokens.where(~p[next_rows, 0].isnan(), -1)
    count = len(items)
    return Pending(
        torch.cat((accepted, tokens)),
        lambda numbers: outcomes_of(zip(numbers[:count], numbers[count:], strict=True)),
    )


def judge_sparsely(
    items: Sequence[VerifyItem], p: Tensor, accept_u: Tensor, next_u: Tensor, test: SparseTest
) -> tuple[Tensor, Tensor]:
    """Judge on a CPU.

    Args:
        items: S rounds.
        p: float64 [sum of the items' rows, V], rows sum to 1.
        accept_u: float64 [S, K], uniform in (0, 1).
        next_u: float64 [S], uniform in (0, 1).
        test: what decides.

    Returns:
        int64 [S] twice: accepted draft tokens, next token.
    """
    chains = SparseChains.of([item.proposal for item in items], p.shape[1])
    accepted, tokens = test(chains, p.numpy(), accept_u.numpy(), next_u.numpy())
    return torch.from_numpy(accepted), torch.from_numpy(tokens)


def judge_densely(
    items: Sequence[VerifyItem], p: Tensor, accept_u: Tensor, next_u: Tensor, test: DenseTest
) -> tuple[Tensor, Tensor]:
    """Judge in tensors, on the device of p; otherwise as `judge_sparsely`. The uniforms are on the host."""
    draft, num_draft, index = _chains(items, p.device)
    q, rows = _drawn_from(items, draft, p.shape[1]), p[index]
    u = to_device(torch.cat([accept_u, next_u[:, None]], dim=1), p.device)
    decision = test(draft, num_draft, rows, q, u[:, : draft.shape[1]], u[:, -1])
    return decision.num_accepted, decision.next_token


def _chains(items: Sequence[VerifyItem], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The chains padded to the longest, their lengths, and the rows of p of each, in one copy to the device.

    Returns:
        int64 [S, K]; int64 [S]; int64 [S, K+1]: the row of each item's i-th distribution, its last row where
        its chain is shorter.
    """
    longest = max(item.num_draft for item in items)
    packed = [
        [
            *item.proposal.token_ids,
            *([-1] * (longest - item.num_draft)),
            item.num_draft,
            *(start + min(i, item.num_draft) for i in range(longest + 1)),
        ]
        for item, start in zip(items, starts_of(items), strict=True)
    ]
    numbers = to_device(torch.tensor(packed, dtype=torch.int64), device)
    return numbers[:, :longest], numbers[:, longest], numbers[:, longest + 1 :]


def _drawn_from(items: Sequence[VerifyItem], draft: Tensor, vocab_size: int) -> Tensor:
    """q of every draft token, float64 [S, K, V]: as sent, or a point mass for a token that was not drawn."""
    q = point_mass(draft, vocab_size)
    where = [(s, i) for s, item in enumerate(items) for i in range(len(item.proposal.distributions))]
    if where:
        sent = [d for item in items for d in item.proposal.distributions]
        sequences, nodes = to_device(torch.tensor(where), draft.device).T
        q[sequences, nodes] = dense_from_sparse(sent, vocab_size, draft.device)
    return q
