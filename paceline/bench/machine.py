"""The machine: processor, versions and memory bandwidth."""

from __future__ import annotations

import importlib.metadata
import math
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.client import WorkerInfo
from paceline.core.system.cores import core_quota, usable_cores

_PACKAGES = ("paceline", "torch", "transformers", "grpcio")
_CPU_BYTES = 512 * 2**20  # many times a last-level cache
_CUDA_BYTES = 4 * 2**30
_REPEATS = 4


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine and the package versions."""

    processor: str
    cores: int
    """Cores that this process may use."""
    core_quota: float | None
    """CPU quota of the control groups (such as a container's), in cores; None is no bound."""
    python: str
    packages: dict[str, str]

    @classmethod
    def here(cls) -> Machine:
        """This machine."""
        quota = core_quota()
        return cls(
            processor=_processor(),
            cores=len(usable_cores()),
            core_quota=None if math.isinf(quota) else quota,
            python=platform.python_version(),
            packages={name: importlib.metadata.version(name) for name in _PACKAGES},
        )

    @property
    def cores_in_words(self) -> str:
        """Number of cores, and the CPU quota if it is lower."""
        quota = self.core_quota
        bound = "" if quota is None or quota >= self.cores else f" (CPU quota {quota:g})"
        return f"{self.cores} cores{bound}"


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """A model as reported by its worker, and the name of its device."""

    name: str
    device: str
    device_name: str
    dtype: str
    num_parameters: int
    weight_bytes: int
    """Bytes of weights read by one decode step."""

    @classmethod
    def of(cls, info: WorkerInfo) -> MeasuredModel:
        """From a worker's report."""
        where = info.device, device_name(info.device)
        return cls(info.model, *where, info.dtype, info.num_parameters, info.weight_bytes)


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def device_name(device: str) -> str:
    """The name of a processor or card."""
    if not device.startswith("cuda"):
        return _processor()
    import torch

    name: str = torch.cuda.get_device_name(device)
    return name


def read_bandwidth(device: str, threads: int, num_bytes: int | None = None) -> float:
    """Bytes per second of the best of several streaming reads (sum, maximum, dot product) of one array.

    Args:
        device: "cpu" or a CUDA device.
        threads: CPU threads, as many as the model has.
        num_bytes: size of the array; by default far larger than any cache.
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
