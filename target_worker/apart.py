"""The rows of a round that could not be judged together, computed one a pass. Pure bookkeeping.

A row that is not numbers says nothing about the others. It may have spoilt those before it, since attention
multiplies masked entries by 0. Computed alone, each row is what plain decoding would have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paceline.core.types import Proposal
from paceline.engine.scheduling.passes import broken_rows
from paceline.grammar import Mask


@dataclass(slots=True)
class RowsApart:
    """The rows after the ledger and after each draft token, as far as they are known.

    They are asked for depth first, so that a tree's node is fed after its parent's path. Behind a draft token
    whose row is not numbers nothing may come, and no row is computed: the path ends with that token, as it
    does where a request permits nothing behind it.
    """

    proposal: Proposal
    at: int | None = field(init=False, default=-1)
    """The draft token whose row is computed next, -1 for none; None if no row is to come."""
    _rows: dict[int, Tensor] = field(init=False, default_factory=dict)
    """Those that are numbers, by draft token."""
    _waiting: list[int] = field(init=False, default_factory=list)

    @property
    def depth(self) -> int:
        """Number of draft tokens that the next row follows."""
        assert self.at is not None
        return len(self.proposal.path_to(self.at)) if self.proposal.is_tree else self.at + 1

    def add(self, row: Tensor) -> None:
        """The row that was to be computed next, float32 [1, V]."""
        assert self.at is not None
        if not broken_rows(row)[0]:
            # A view would keep the logits of the whole pass.
            self._rows[self.at] = row.clone()
            self._waiting += reversed(self._behind(self.at))
        self.at = self._waiting.pop() if self._waiting else None

    def whole(self) -> tuple[Tensor, Mask] | None:
        """All rows, and the tokens that may come in each; None if the row after the ledger is not numbers."""
        if -1 not in self._rows:
            return None
        count, vocab_size = self.proposal.num_draft_tokens + 1, self._rows[-1].shape[1]
        nothing = torch.zeros_like(self._rows[-1])
        allowed = np.zeros((count, vocab_size), dtype=np.bool_)
        allowed[[i + 1 for i in self._rows]] = True
        return torch.cat([self._rows.get(i - 1, nothing) for i in range(count)]), allowed

    def _behind(self, at: int) -> Sequence[int]:
        proposal = self.proposal
        if not proposal.is_tree:
            return range(at + 1, min(at + 2, proposal.num_draft_tokens))
        return [node for node, parent in enumerate(proposal.parents) if parent == at]
