"""Acceptance of a batch of draft chains with sparse distributions, on a CPU.

The mathematics is that of acceptance.py, and the tests check both with the same enumerations. A chain costs a
few passes over its rows of p; no dense q is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.types import Proposal, SparseDistribution
from paceline.decoding.cpu import distributions
from paceline.decoding.sampling import sparse_arrays

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SparseChains:
    """S concatenated chains and their distributions q; fields are named as in distributions.py."""

    draft: Indices
    first: Indices
    ids: npt.NDArray[np.uint32]
    values: npt.NDArray[np.float32]
    ends: Indices

    @classmethod
    def of(cls, proposals: Sequence[Proposal], vocab_size: int) -> SparseChains:
        """Lay out chains; a token without a distribution has a point mass.

        Raises:
            InvalidArgumentError: `proposal.distributions`, as `check_sparse`.
        """
        tokens = [token for proposal in proposals for token in proposal.token_ids]
        first = np.cumsum([0, *(proposal.num_draft_tokens for proposal in proposals)])
        sent = [d for proposal in proposals for d in proposal.distributions or _points(proposal)]
        return cls(np.array(tokens, dtype=np.int64), first, *sparse_arrays(sent, vocab_size))


def _points(proposal: Proposal) -> list[SparseDistribution]:
    return list(map(SparseDistribution.point, proposal.token_ids))


def accept_rejection(
    chains: SparseChains, p: Floats, accept_u: Floats, next_u: Floats
) -> tuple[Indices, Indices]:
    """Accept token by token with probability min(1, p/q), as `acceptance.accept_rejection`.

    Args:
        chains: S chains with N tokens in total.
        p: [N + S, V], rows sum to 1: the rows of each chain in order.
        accept_u: [S, K], uniform in (0, 1), K at least the longest chain.
        next_u: [S], uniform in (0, 1).

    Returns:
        The number of accepted tokens of each chain, and its next token: two [S].
    """
    accepted, scale = _judged(distributions.judge_one_by_one, chains, p, accept_u)
    return accepted, next_tokens(chains, p, accepted, scale, next_u)


def accept_block(
    chains: SparseChains, p: Floats, accept_u: Floats, next_u: Floats
) -> tuple[Indices, Indices]:
    """Block verification, as `acceptance.accept_block`; arguments as for `accept_rejection`."""
    accepted, scale = _judged(distributions.judge_as_a_whole, chains, p, accept_u)
    return accepted, next_tokens(chains, p, accepted, scale, next_u)


def _judged(
    judge: Callable[..., Any], chains: SparseChains, p: Floats, accept_u: Floats
) -> tuple[Indices, Floats]:
    """The number of accepted tokens, and the factor of p in the residual of the next token: two [S]."""
    count = len(chains.first) - 1
    accepted, scale = np.empty(count, dtype=np.int64), np.empty(count)
    c = chains
    judge(c.draft, c.first, p, c.ids, c.values, c.ends, np.ascontiguousarray(accept_u), accepted, scale)
    return accepted, scale


def next_tokens(chains: SparseChains, p: Floats, accepted: Indices, scale: Floats, next_u: Floats) -> Indices:
    """The correction or bonus token of each chain: [S]."""
    tokens, c = np.empty(len(accepted), dtype=np.int64), chains
    u = np.ascontiguousarray(next_u)
    distributions.draw_next(c.first, p, c.ids, c.values, c.ends, accepted, scale, u, tokens)
    return tokens
