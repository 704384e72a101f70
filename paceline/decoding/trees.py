"""Acceptance of one draft tree.

A tree is a list of nodes in topological order, each with the index of its parent, or -1 for children of the
root (the newest token of the ledger). Row 0 of choices and of p belongs to the root, row i + 1 to node i.
The acceptance functions return a Decision on one sequence (S = 1); its path holds node indices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.errors import InvalidArgumentError
from paceline.decoding.acceptance import Decision
from paceline.decoding.cpu.distributions import RESIDUAL_FLOOR
from paceline.decoding.sampling import draw


def children_of(parents: Sequence[int]) -> list[list[int]]:
    """Children in order: entry 0 for the root, entry i + 1 for node i.

    Raises:
        InvalidArgumentError: `proposal.parents`, if a parent does not come before its child.
    """
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise InvalidArgumentError("proposal.parents", f"node {node} has parent {parent}")
        children[parent + 1].append(node)
    return children


def walk_coupled(token_ids: Sequence[int], parents: Sequence[int], choices: Tensor) -> Decision:
    """Starting at the root, follow the child that equals the target's choice, until no child does.

    If the choices are argmaxes, this is greedy decoding (SpecInfer, Miao et al. 2024).

    Args:
        token_ids: N draft tokens.
        parents: N.
        choices: int64 [N+1]: the target's own token after the root and after each node.

    Raises:
        InvalidArgumentError: `proposal.parents`.
    """
    children = children_of(parents)
    chosen = choices.tolist()
    path: list[int] = []
    at = 0
    while (child := next((c for c in children[at] if token_ids[c] == chosen[at]), None)) is not None:
        path.append(child)
        at = child + 1
    return _decision(path, len(parents), choices[at : at + 1], is_bonus=not children[at])


def accept_tree_rejection(
    token_ids: Sequence[int], parents: Sequence[int], p: Tensor, q: Tensor, accept_u: Tensor, next_u: Tensor
) -> Decision:
    """SpecInfer's multi-step speculative sampling (Miao et al. 2024, algorithm 2).

    Siblings are tried in order: child c is accepted with probability min(1, p(c)/q(c)); after a rejection
    p becomes norm(max(0, p - q)) for the next sibling, and for the final draw when none is left.

    The result has the target's distribution if siblings are independent draws from their q, or are drawn
    without replacement and each q is renormalised over the tokens that earlier siblings left. `accept_u` must
    be drawn anew in every round (see noise.py).

    Args:
        token_ids: N draft tokens.
        parents: N.
        p: float [N+1, V], rows sum to 1: the target's distribution after the root and after each node.
        q: float [N, V], rows sum to 1: the distribution each node was drawn from.
        accept_u: float64 [N], uniform in (0, 1).
        next_u: float64 [1], uniform in (0, 1).

    Raises:
        InvalidArgumentError: `proposal.parents`.
    """
    children = children_of(parents)
    tests = accept_u.tolist()
    path: list[int] = []
    at = 0
    current = p[0].double()
    while True:
        for child in children[at]:
            token, q_child = token_ids[child], q[child].double()
            # u < p/q without the division; a token with p = 0 is never accepted.
            if tests[child] * float(q_child[token]) < float(current[token]):
                path.append(child)
                at = child + 1
                current = p[at].double()
                break
            residual = (current - q_child).clamp_(min=0.0)
            total = residual.sum()
            if total > RESIDUAL_FLOOR:
                current = residual / total
        else:
            break
    return _decision(path, len(parents), draw(current[None], next_u), is_bonus=not children[at])


def _decision(path: list[int], num_nodes: int, next_token: Tensor, *, is_bonus: bool) -> Decision:
    device = next_token.device
    padded = path + [-1] * (num_nodes - len(path))
    return Decision(
        path=torch.tensor([padded], dtype=torch.int64, device=device),
        num_accepted=torch.tensor([len(path)], device=device),
        next_token=next_token,
        is_bonus=torch.tensor([is_bonus], device=device),
    )
