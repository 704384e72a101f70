"""Rounds that are judged in several ways in one pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from paceline.decoding.transfer import rows_at
from target_worker.acceptance.interface import Pending, RuleOutcome
from target_worker.acceptance.items import VerifyItem, rows_of, starts_of

Kind = TypeVar("Kind", bound=Hashable)


def judge_by_kind(
    items: Sequence[VerifyItem],
    rows: Tensor,
    kind_of: Callable[[VerifyItem], Kind],
    judge: Callable[[Kind, Sequence[VerifyItem], Tensor], Pending],
) -> Pending:
    """Judge the items of each kind together, without waiting for the device.

    Args:
        items: S rounds.
        rows: [sum of the items' rows, V], each item's rows in order.
        kind_of: the kind of an item.
        judge: decides on the items of one kind, from their rows.
    """
    starts = starts_of(items)
    members: dict[Kind, list[int]] = {}
    for i, item in enumerate(items):
        members.setdefault(kind_of(item), []).append(i)
    parts: list[Pending] = []
    for kind, own in members.items():
        group = [items[i] for i in own]
        of_group = rows if len(members) == 1 else rows_at(rows, rows_of(group, [starts[i] for i in own]))
        parts.append(judge(kind, group, of_group))
    return parts[0] if len(parts) == 1 else _together(parts, list(members.values()))


def _together(parts: Sequence[Pending], members: Sequence[Sequence[int]]) -> Pending:
    """Several decisions as one; `members` are the places of each part's items."""
    sizes = [len(part.numbers) for part in parts]

    def read(numbers: Sequence[int]) -> list[RuleOutcome]:
        outcomes: dict[int, RuleOutcome] = {}
        for part, own, numbers_of_part in zip(parts, members, _split(numbers, sizes), strict=True):
            outcomes.update(zip(own, part.read(numbers_of_part), strict=True))
        return [outcomes[i] for i in range(len(outcomes))]

    return Pending(torch.cat([part.numbers for part in parts]), read)


def _split(values: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    ends = itertools.accumulate(sizes)
    return [values[end - size : end] for size, end in zip(sizes, ends, strict=True)]
