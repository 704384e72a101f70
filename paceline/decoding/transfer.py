"""Small tensors from the host to a device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | None) -> Tensor:
    """`tensor`, which is on the host, on `device`; None is the CPU, where it is returned as it is.

    A copy from pageable memory to a CUDA device waits until all work before it is done. So the tensor is
    pinned first, and the device reads it when it gets there; torch uses pinned memory again only afterwards.
    """
    if device is None or device.type == "cpu":
        return tensor
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def rows_at(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """The rows of a tensor at these places, without waiting for its device."""
    return tensor.index_select(0, to_device(torch.tensor(rows, dtype=torch.int64), tensor.device))
