"""What verification needs of a model besides passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from paceline.engine.cancel import CancelToken
from paceline.engine.layout import SequenceInput
from paceline.engine.scheduling import passes


class TargetRunner(passes.PassRunner, Protocol):
    """The model of a target worker."""

    @property
    def cancellable(self) -> bool:
        """True where a pass can be cancelled."""

    def copy_slots(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy the entries of single slots; no slot may be on both sides."""

    def forward_cancellable(
        self, inputs: Sequence[SequenceInput], cancel: CancelToken
    ) -> torch.Tensor | None:
        """Like `forward`. If it is cancelled before the halfway point: None, and nothing has changed."""
