"""On what was measured."""

from __future__ import annotations

import importlib.metadata
import math
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.client.server_status import WorkerInfo
from paceline.core.cores import core_quota, usable_cores

_PACKAGES = ("paceline", "torch", "transformers", "grpcio")


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine and the versions that ran on it."""

    processor: str
    cores: int
    """That this process may use."""
    core_quota: float | None
    """For how many of them its control groups, a container's among them, give it time; None is no bound."""
    last_level_cache: str
    """As the system tells it; empty where it does not."""
    python: str
    packages: dict[str, str]

    @classmethod
    def here(cls) -> Machine:
        """This one."""
        quota = core_quota()
        return cls(
            processor=_processor(),
            cores=len(usable_cores()),
            core_quota=None if math.isinf(quota) else quota,
            last_level_cache=_last_level_cache(),
            python=platform.python_version(),
            packages={name: version for name in _PACKAGES if (version := installed(name))},
        )

    @property
    def cores_in_words(self) -> str:
        """How many, and for how many of them there is time where that is less."""
        quota = self.core_quota
        bound = "" if quota is None or quota >= self.cores else f" (time for {quota:g})"
        return f"{self.cores} cores{bound}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Model:
    """One of the models as its worker described it, and what its device is."""

    name: str
    device: str
    device_name: str
    dtype: str
    num_parameters: int
    weight_bytes: int
    """Bytes of weights that a decode step reads."""

    @classmethod
    def of(cls, info: WorkerInfo) -> Model:
        """From what a worker says of itself."""
        where = info.device, _device_name(info.device)
        return cls(info.model, *where, info.dtype, info.num_parameters, info.weight_bytes)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def installed(package: str) -> str | None:
    """The version of a package, None if it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _last_level_cache() -> str:
    caches = Path("/sys/devices/system/cpu/cpu0/cache")
    sizes = {}
    for level in caches.glob("index*/level"):
        size = level.with_name("size")
        if size.is_file():
            sizes[int(level.read_text(encoding="ascii"))] = size.read_text(encoding="ascii").strip()
    return sizes[max(sizes)] if sizes else ""


def _device_name(device: str) -> str:
    if not device.startswith("cuda"):
        return _processor()
    import torch

    name: str = torch.cuda.get_device_name(device)
    return name
