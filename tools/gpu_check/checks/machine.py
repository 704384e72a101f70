"""The device: memory bandwidth, and the host's time for a launch."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from tools.gpu_check.device import Device
from tools.gpu_check.report import Figures
from tools.gpu_check.running import Bench, Case, Check

_CARD_BYTES = 4 << 30
_PRETENDED_BYTES = 1 << 22
_LAUNCHES = 1000


@functools.cache
def bandwidth(device: Device) -> float:
    """Bytes a second of the best of several reads of one array."""
    size = _PRETENDED_BYTES if device.pretended else min(_CARD_BYTES, device.free_bytes() // 2)
    data = torch.ones(size // 4, dtype=torch.float32, device=device.torch)
    data.sum()
    return size / min(device.seconds(reads, 1) for reads in (data.sum, data.amax) for _ in range(4))


def _cases(bench: Bench) -> Iterator[Case]:
    def reads() -> Figures:
        return {"GB_per_second": bandwidth(bench.device) / 1e9}

    def launches() -> Figures:
        one = torch.ones(1, device=bench.device.torch)
        seconds = bench.device.seconds(lambda: one.add_(1), _LAUNCHES)
        return {"launch_us": seconds * 1e6}

    yield "memory bandwidth", reads
    yield "launches", launches


CHECK = Check("machine", "memory bandwidth and the time of a launch", _cases)
