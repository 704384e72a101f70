"""What `ModelDrafter` needs of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from paceline.engine.cancel import CancelToken
from paceline.engine.layout import BranchInput
from paceline.engine.multi_step import Chain, ChainInput, ChainSkills
from paceline.engine.scheduling import passes
from paceline.kv import Branch


class DraftRunner(passes.PassRunner, Protocol):
    """A model with a paged cache; `paceline.engine.runner.ModelRunner` is the one that serves."""

    @property
    def row_invariant(self) -> bool:
        """True when a row's logits are bitwise the same whatever other rows are in its pass."""

    def forward_branches(self, inputs: Sequence[BranchInput]) -> torch.Tensor:
        """Feed every branch one token; float32 logits [len(inputs), vocabulary]."""

    def adopt(self, branch: Branch) -> None:
        """Make a branch's entries those of its table. Raises ResourceExhaustedError."""

    def copy_slots(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy the entries of single slots; no slot may be on both sides."""

    @property
    def chain_skills(self) -> ChainSkills | None:
        """What it can do when it draws several tokens by itself; None where it cannot."""

    def forward_chains(self, inputs: Sequence[ChainInput], cancel: CancelToken | None = None) -> list[Chain]:
        """Each chain, shorter where it was stopped, empty where its tokens must be drawn one by one.

        Raises ResourceExhaustedError.
        """
