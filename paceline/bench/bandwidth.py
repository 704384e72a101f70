"""How fast this machine reads memory: the floor under a decode step, which reads every weight once."""

from __future__ import annotations

import time
from collections.abc import Callable

_CPU_BYTES = 512 * 2**20  # many times a last-level cache
_CUDA_BYTES = 4 * 2**30
_REPEATS = 4


def read_bandwidth(device: str, threads: int, num_bytes: int | None = None) -> float:
    """Bytes per second of the best of several streaming reads (sum, maximum, dot product) of one array.

    Args:
        device: "cpu" or a CUDA device.
        threads: that compute on a CPU; as many as the model has.
        num_bytes: the array's size; by default far more than any cache holds.
    """
    import torch

    cuda = device.startswith("cuda")
    size = num_bytes or (_CUDA_BYTES if cuda else _CPU_BYTES)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        data = torch.ones(size // 4, dtype=torch.float32, device=device)
        reads: tuple[Callable[[], object], ...] = (data.sum, data.max, lambda: torch.dot(data, data))
        fastest = min(_seconds(read, cuda) for read in reads for _ in range(_REPEATS))
    finally:
        torch.set_num_threads(before)
    return data.numel() * 4 / fastest


def _seconds(read: Callable[[], object], cuda: bool) -> float:
    import torch

    if cuda:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    read()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begun
