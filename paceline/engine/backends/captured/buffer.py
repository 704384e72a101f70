"""Numbers that the host writes and a replay reads at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from paceline.engine.layout import Indices


class Buffer:
    """int64 arrays on the host and on a device, the current one, sent in one transfer."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        """All of them 0. `sizes`: number of items of each array."""
        pinned = device.type == "cuda" and torch.cuda.is_available()
        self._host = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=pinned)
        self._device = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self.host: list[Indices] = np.split(self._host.numpy(), np.cumsum(sizes)[:-1])
        self.device = torch.split(self._device, list(sizes))
        self._sent = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Wait until the last transfer has read the host's arrays."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self) -> None:
        """Copy the host's arrays to the device's."""
        self._device.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
