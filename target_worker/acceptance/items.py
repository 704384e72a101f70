"""The rounds that are judged together, and which rows of logits belong to each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.types import Proposal, SequenceParams


@dataclass(frozen=True, slots=True)
class VerifyItem:
    """One round to judge: its request, the ledger, and the proposal, which is a chain."""

    params: SequenceParams
    ledger: Sequence[int]
    proposal: Proposal

    @property
    def num_draft(self) -> int:
        """K of this round."""
        return self.proposal.num_draft_tokens

    @property
    def rows(self) -> int:
        """Rows of logits of this round: row i gives the distribution after i draft tokens."""
        return self.num_draft + 1

    @property
    def seed(self) -> int:
        """The request's seed; the coordinator has drawn one where the client gave none."""
        assert self.params.sampling.seed is not None
        return self.params.sampling.seed


def starts_of(items: Sequence[VerifyItem]) -> list[int]:
    """The first row of each item, where the rows of all items follow one another."""
    starts, row = [], 0
    for item in items:
        starts.append(row)
        row += item.rows
    return starts


def rows_of(items: Sequence[VerifyItem], starts: Sequence[int]) -> list[int]:
    """All rows of items that begin at these rows."""
    return [row for item, start in zip(items, starts, strict=True) for row in range(start, start + item.rows)]


def sound_items(items: Sequence[VerifyItem], usable: Sequence[int]) -> list[bool]:
    """Which items have usable rows only, from what is true of each row."""
    starts = starts_of(items)
    return [all(usable[start : start + item.rows]) for item, start in zip(items, starts, strict=True)]
