"""Small tensors from the host to a device without waiting for it, and results back with one wait."""

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


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, which are on one device, on the host: in one copy, whatever their types and shapes."""
    if len(tensors) == 1 or all(tensor.device.type == "cpu" for tensor in tensors):
        return [tensor.cpu() for tensor in tensors]
    # Widest numbers first: each tensor then begins at a multiple of its numbers' size.
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i].itemsize)
    packed = torch.cat([tensors[i].reshape(-1).view(torch.uint8) for i in order]).cpu()
    parts = torch.split(packed, [tensors[i].nbytes for i in order])
    on_host = dict(zip(order, parts, strict=True))
    return [on_host[i].view(tensor.dtype).view(tensor.shape) for i, tensor in enumerate(tensors)]
