"""The rounds that are judged together, and which rows of logits belong to each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.types import Outcome, Proposal, SequenceParams
from paceline.engine.tree_places import TreePlaces


@dataclass(frozen=True, slots=True)
class VerifyItem:
    """One round to judge: its request, the ledger, and the proposal."""

    params: SequenceParams
    ledger: Sequence[int]
    proposal: Proposal

    @property
    def num_draft(self) -> int:
        """K of a chain, number of nodes of a tree."""
        return self.proposal.num_draft_tokens

    @property
    def rows(self) -> int:
        """Rows of logits of this round: after the ledger, then after each draft token."""
        return self.num_draft + 1

    @property
    def depths(self) -> Sequence[int]:
        """Number of draft tokens before each row, which follow one another in a chain or on a path."""
        if not self.proposal.is_tree:
            return range(self.rows)
        return 0, *TreePlaces.of(self.proposal.parents).depths

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


def accepted_nodes(proposal: Proposal, outcome: Outcome) -> Sequence[int]:
    """The indices of the draft tokens that an outcome accepts, in order."""
    return proposal.path_to(outcome.last_node) if proposal.is_tree else range(outcome.num_accepted)


def ending_with(proposal: Proposal, path: Sequence[int]) -> Outcome:
    """The outcome whose accepted draft tokens and next token are those of the path."""
    *before, last = path
    parent = before[-1] if before and proposal.is_tree else None
    return Outcome(len(before), proposal.token_ids[last], parent)
