"""Acceptance of one draft tree.

A tree is a list of nodes in topological order, each with the index of its parent, or -1 for children of the
root (the newest token of the ledger). Row 0 of choices and of p belongs to the root, row i + 1 to node i.
The acceptance functions return a Decision on one sequence (S = 1); its path holds node indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.errors import InvalidArgumentError
from paceline.decoding.acceptance import Decision
from paceline.decoding.cpu.distributions import RESIDUAL_FLOOR
from paceline.decoding.sampling import draw


class Rows(Protocol):
    """Rows by number, such as those of a tensor. Only the rows that decide are asked for."""

    def __getitem__(self, row: int, /) -> Tensor:
        """[V]."""


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
    path = follow(token_ids, parents, choices.tolist())
    at = path[-1] + 1 if path else 0
    return _decision(path, len(parents), choices[at : at + 1], is_bonus=not children_of(parents)[at])


def follow(token_ids: Sequence[int], parents: Sequence[int], choices: Sequence[int]) -> list[int]:
    """The path of `walk_coupled`, from choices on the host."""
    children = children_of(parents)
    path: list[int] = []
    at = 0
    while (child := next((c for c in children[at] if token_ids[c] == choices[at]), None)) is not None:
        path.append(child)
        at = child + 1
    return path


def accept_tree_rejection(
    token_ids: Sequence[int],
    parents: Sequence[int],
    p: Rows,
    q: Rows,
    accept_u: Tensor,
    next_u: Tensor,
    tries: Sequence[int] | None = None,
) -> Decision:
    """SpecInfer's multi-step speculative sampling (Miao et al. 2024, algorithm 2).

    A try is a token that a drafter has drawn after a node. The tries after one node are judged in order: one
    of token c is accepted with probability min(1, p(c)/q(c)); after a rejection p becomes
    norm(max(0, p - q)) for the next try, and for the final draw when none is left.

    Tries that drew the same token after the same node share a node, since its row need not be computed twice;
    each is judged with the q it was drawn from. A try without a draw, as of a drafter that copies, has a
    point mass as q.

    The result has the target's distribution if a try's place, its q and whether it is made at all depend on
    what was drawn before it, never on its own token or on a later one: independent draws, draws without
    replacement with q renormalised over the tokens that earlier siblings left, several drafters one after the
    other. `accept_u` must be drawn anew in every round (see noise.py). tree_batch.py decides alike for many
    trees at once.

    Args:
        token_ids: N draft tokens.
        parents: N.
        p: float [N+1, V], rows sum to 1: the target's distribution after the root and after each node. A row
            of NaN, where no token may follow, ends the path, with an invalid next token.
        q: float [T, V], rows sum to 1: the distribution each try was drawn from.
        accept_u: float64 [T], uniform in (0, 1).
        next_u: float64 [1], uniform in (0, 1).
        tries: T: each try's node, in the order in which siblings are judged; None for one try a node, in the
            order of the nodes.

    Raises:
        InvalidArgumentError: `proposal.parents`; `proposal.tries` for a try of no node, or a node of no try.
    """
    children = children_of(parents)
    tries_after = _tries_after(parents, range(len(parents)) if tries is None else tries)
    tests = accept_u.tolist()
    path: list[int] = []
    at = 0
    current = p[0].double()
    while True:
        for number, node in tries_after[at]:
            token, q_try = token_ids[node], q[number].double()
            # u < p/q without the division; a token with p = 0 is never accepted.
            if tests[number] * float(q_try[token]) < float(current[token]):
                path.append(node)
                at = node + 1
                current = p[at].double()
                break
            residual = (current - q_try).clamp_(min=0.0)
            total = residual.sum()
            if total > RESIDUAL_FLOOR:
                current = residual / total
        else:
            break
    return _decision(path, len(parents), draw(current[None], next_u), is_bonus=not children[at])


def _tries_after(parents: Sequence[int], tries: Sequence[int]) -> list[list[tuple[int, int]]]:
    """(try, its node) in order: entry 0 after the root, entry i + 1 after node i."""
    after: list[list[tuple[int, int]]] = [[] for _ in range(len(parents) + 1)]
    for number, node in enumerate(tries):
        if not 0 <= node < len(parents):
            raise InvalidArgumentError("proposal.tries", f"try {number} names node {node} of {len(parents)}")
        after[parents[node] + 1].append((number, node))
    if missing := set(range(len(parents))) - set(tries):
        raise InvalidArgumentError("proposal.tries", f"no try has drawn node {min(missing)}")
    return after


def _decision(path: list[int], num_nodes: int, next_token: Tensor, *, is_bonus: bool) -> Decision:
    device = next_token.device
    padded = path + [-1] * (num_nodes - len(path))
    return Decision(
        path=torch.tensor([padded], dtype=torch.int64, device=device),
        num_accepted=torch.tensor([len(path)], device=device),
        next_token=next_token,
        is_bonus=torch.tensor([is_bonus], device=device),
    )
