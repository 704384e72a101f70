"""What drafting needs of a model besides passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from paceline.engine import passes
from paceline.engine.branches import BranchInput
from paceline.engine.chains import Chain, ChainInput
from paceline.kv import Branch


class Runner(passes.Runner, Protocol):
    """A model of a draft worker."""

    def forward_branches(self, inputs: Sequence[BranchInput]) -> torch.Tensor:
        """Feed every branch one token; float32 logits [len(inputs), vocabulary]."""

    def adopt(self, branch: Branch) -> None:
        """Make a branch's entries those of its table. Raises ResourceExhaustedError."""

    @property
    def draws_chains(self) -> bool:
        """True when it can draw several tokens by itself."""

    def forward_chains(self, inputs: Sequence[ChainInput]) -> list[Chain]:
        """Each chain, shorter where logits are no numbers. Raises ResourceExhaustedError."""
