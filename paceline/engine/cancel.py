"""How one thread cancels what another one computes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class CancelToken:
    """Cancels passes and chains: a chain ends with its step, a pass only before it is half done."""

    def __init__(self) -> None:
        self.flag: npt.NDArray[np.int8] = np.zeros(1, dtype=np.int8)
        """int8 [1], not 0 once cancelled; compiled code looks at it."""

    @property
    def cancelled(self) -> bool:
        """True from `cancel` until `reset`."""
        return bool(self.flag[0])

    def cancel(self) -> None:
        """May be called from any thread."""
        self.flag[0] = 1

    def reset(self) -> None:
        """Called before the commands that wait are taken up, never after: a cancellation that came in between
        would be lost."""
        self.flag[0] = 0
