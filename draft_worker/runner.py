"""What drafting needs of a model besides passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from paceline.engine import passes
from paceline.engine.branches import BranchInput
from paceline.engine.chains import Chain, ChainInput, ChainSkills
from paceline.kv import Branch


class Runner(passes.Runner, Protocol):
    """A model of a draft worker."""

    def forward_branches(self, inputs: Sequence[BranchInput]) -> torch.Tensor:
        """Feed every branch one token; float32 logits [len(inputs), vocabulary]."""

    def adopt(self, branch: Branch) -> None:
        """Make a branch's entries those of its table. Raises ResourceExhaustedError."""

    @property
    def chain_skills(self) -> ChainSkills | None:
        """What it can do when it draws several tokens by itself; None where it cannot."""

    def forward_chains(self, inputs: Sequence[ChainInput]) -> list[Chain]:
        """Each chain, shorter where its tokens must be drawn one by one. Raises ResourceExhaustedError."""
