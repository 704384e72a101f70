"""Lets one thread cancel the computation of another."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class CancelToken:
    """Cancels passes and chains: a chain ends with its step, a pass only before its halfway point."""

    def __init__(self) -> None:
        self.flag: npt.NDArray[np.int8] = np.zeros(1, dtype=np.int8)
        """int8 [1], nonzero once cancelled; compiled code reads it."""

    @property
    def cancelled(self) -> bool:
        """True from `cancel` until `reset`."""
        return bool(self.flag[0])

    def cancel(self) -> None:
        """May be called from any thread."""
        self.flag[0] = 1

    def reset(self) -> None:
        """Call before waiting commands are processed; later, a new cancellation would be lost."""
        self.flag[0] = 0
