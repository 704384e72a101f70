"""What verification needs of a model besides passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from paceline.engine.cancel import CancelToken
from paceline.engine.layout import SequenceInput
from paceline.engine.scheduling import passes


class Runner(passes.Runner, Protocol):
    """A model of a target worker."""

    @property
    def can_stop(self) -> bool:
        """True where a pass can be given up."""

    def forward_unless(self, inputs: Sequence[SequenceInput], cancel: CancelToken) -> torch.Tensor | None:
        """Like `forward`, but given up if that is wanted before it is half done: None, all as before."""
