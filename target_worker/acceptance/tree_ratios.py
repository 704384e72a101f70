"""Trees judged by p and q, by SpecInfer's rule (Miao et al. 2024): try by try after each node.

On a CPU only the rows on the way are looked at. On other devices all rows are judged at once, and the host
walks the trees when their decisions have come. Both give the same decisions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.decoding.noise import Purpose
from paceline.decoding.sampling import dense_from_sparse, point_mass
from paceline.decoding.transfer import to_device
from paceline.decoding.tree_batch import TreeTries, judge_rows
from paceline.decoding.trees import accept_tree_rejection
from target_worker.acceptance.interface import Pending, RuleOutcome, on_host
from target_worker.acceptance.items import VerifyItem, starts_of
from target_worker.acceptance.noise import RoundNoise


def judge_trees(items: Sequence[VerifyItem], scores: Tensor, noise: RoundNoise) -> Pending:
    """Judge rounds whose proposals are trees; otherwise as `Judge`."""
    accept_u = noise.uniforms(Purpose.ACCEPT_TEST, max(len(tries_of(item)) for item in items))
    next_u = noise.uniforms(Purpose.NEXT_TOKEN, 1)
    judge = judge_lazily if on_host(scores) else judge_at_once
    return judge(items, scores, accept_u, next_u)


def tries_of(item: VerifyItem) -> Sequence[int]:
    """The node of each try, in the order in which they are judged."""
    return item.proposal.tries or range(item.num_draft)


@dataclass(frozen=True, slots=True)
class _Lazily:
    """Rows that are computed when they are asked for."""

    row: Callable[[int], Tensor]

    def __getitem__(self, row: int, /) -> Tensor:
        return self.row(row)


def judge_lazily(items: Sequence[VerifyItem], scores: Tensor, accept_u: Tensor, next_u: Tensor) -> Pending:
    """Judge on a CPU.

    Args:
        items: S rounds.
        scores: float32 [sum of the items' rows, V].
        accept_u: float64 [S, T], uniform in (0, 1), T at least the most tries.
        next_u: float64 [S, 1], uniform in (0, 1).
    """
    outcomes = [
        _judge_one(item, scores[start : start + item.rows], accept_u[i], next_u[i])
        for i, (item, start) in enumerate(zip(items, starts_of(items), strict=True))
    ]
    return Pending(torch.empty(0, dtype=torch.int64), lambda _: outcomes)


def _judge_one(item: VerifyItem, scores: Tensor, accept_u: Tensor, next_u: Tensor) -> RuleOutcome:
    proposal, tries, vocab_size = item.proposal, tries_of(item), scores.shape[1]

    def drawn_from(number: int) -> Tensor:
        if proposal.distributions:
            return dense_from_sparse([proposal.distributions[number]], vocab_size)[0]
        return point_mass(torch.tensor(proposal.token_ids[tries[number]]), vocab_size)

    p = _Lazily(lambda row: scores[row].softmax(-1, dtype=torch.float64))
    of_tree = proposal.token_ids, proposal.parents, p, _Lazily(drawn_from)
    decision = accept_tree_rejection(*of_tree, accept_u[: len(tries)], next_u, tries)
    accepted = int(decision.num_accepted)
    last = int(decision.path[0, accepted - 1]) if accepted else None
    # Where no token is possible, the softmax is NaN in every place.
    possible = bool(scores[0 if last is None else last + 1].amax() > -torch.inf)
    return RuleOutcome(accepted, int(decision.next_token) if possible else None, last)


def judge_at_once(items: Sequence[VerifyItem], scores: Tensor, accept_u: Tensor, next_u: Tensor) -> Pending:
    """Judge in tensors, on the device of the scores; otherwise as `judge_lazily`."""
    p = scores.softmax(-1, dtype=torch.float64)
    possible = ~p[:, 0].isnan()
    starts, counts = starts_of(items), [len(tries_of(item)) for item in items]
    firsts = [0, *itertools.accumulate(counts)]
    rows, token_ids = list[int](), list[int]()
    for item, start in zip(items, starts, strict=True):
        rows += (start + item.proposal.parents[node] + 1 for node in tries_of(item))
        token_ids += (item.proposal.token_ids[node] for node in tries_of(item))
    u = torch.cat([line[:count] for line, count in zip(accept_u, counts, strict=True)])
    each = next_u[:, 0].repeat_interleave(torch.tensor([item.rows for item in items]))
    q = _drawn_from(items, token_ids, firsts, p)
    accepted, tokens = judge_rows(TreeTries(rows, token_ids), p, q, u, each)
    tokens = tokens.where(possible, -1)

    def read(numbers: Sequence[int]) -> list[RuleOutcome]:
        half = len(numbers) // 2
        return [
            _walk(item, first, numbers[start : start + item.rows], numbers[half + start :])
            for item, start, first in zip(items, starts, firsts, strict=False)
        ]

    return Pending(torch.cat((accepted, tokens)), read)


def _drawn_from(
    items: Sequence[VerifyItem], token_ids: Sequence[int], firsts: Sequence[int], p: Tensor
) -> Tensor:
    """q of every try, float64 [T, V]: as sent, or a point mass."""
    q = point_mass(to_device(torch.tensor(token_ids, dtype=torch.int64), p.device), p.shape[1])
    sent = [d for item in items for d in item.proposal.distributions]
    if sent:
        where = [
            first + i
            for item, first in zip(items, firsts, strict=False)
            for i in range(len(item.proposal.distributions))
        ]
        q[to_device(torch.tensor(where), p.device)] = dense_from_sparse(sent, p.shape[1], p.device)
    return q


def _walk(item: VerifyItem, first: int, accepted: Sequence[int], tokens: Sequence[int]) -> RuleOutcome:
    """The path from the root: `accepted` has the try after each row, numbered from `first` on."""
    tries, count, last = tries_of(item), 0, -1
    while (number := accepted[last + 1]) >= 0:
        last = tries[number - first]
        count += 1
    token = tokens[last + 1]
    return RuleOutcome(count, token if token >= 0 else None, last if count else None)
