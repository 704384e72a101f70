"""The devices of a stack's workers, and how workers on one GPU divide its memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from paceline.assets.checkpoints import weight_bytes

_SHARES: Final = {"target": 0.7, "draft": 0.3}
"""Division of a GPU's share between a target and its drafts if their weights' sizes are unknown. A draft
commonly needs a third of a target's memory or less."""
_BESIDE_WEIGHTS: Final = 1 << 29
"""Bytes that are added to a worker's weights where sizes divide a GPU: for logits and buffers, which even the
smallest model needs."""
_DEVICES = Path("/dev")
_WSL_CUDA = Path("/usr/lib/wsl/lib/libcuda.so.1")
"""Present in WSL if Windows has an NVIDIA driver."""


def kind_of(role: str) -> str:
    """`target` or `draft` for the name of a worker."""
    return role.partition("-")[0]


def sharers(role: str, devices: Mapping[str, str]) -> tuple[str, ...]:
    """All workers on this one's GPU, of those with these devices; itself on a CPU.

    `auto` and `cuda` mean the first GPU.
    """
    first = {"auto": "cuda:0", "cuda": "cuda:0"}
    gpus = {each: first.get(device, device) for each, device in devices.items() if not on_cpu(device)}
    return tuple(each for each in devices if each == role or (role in gpus and gpus.get(each) == gpus[role]))


def parts(models: Mapping[str, str]) -> Mapping[str, float]:
    """Division of a GPU's share between the workers with these models: by their weights, if all are known."""
    sizes = {role: weight_bytes(model) for role, model in models.items()}
    needs: dict[str, float] = {
        role: size + _BESIDE_WEIGHTS for role, size in sizes.items() if size is not None
    }
    if len(needs) < len(sizes):
        kinds = list(map(kind_of, models))
        needs = {role: _SHARES[kind_of(role)] / kinds.count(kind_of(role)) for role in models}
    return {role: need / sum(needs.values()) for role, need in needs.items()}


def on_cpu(device: str) -> bool:
    """Whether a worker with this device computes on a CPU."""
    return device == "cpu" or (device == "auto" and not _may_have_cuda())


def _may_have_cuda() -> bool:
    """Whether there may be an NVIDIA GPU, with any number, because a container may not have the first. Under
    WSL, GPUs of all makers share one device node."""
    return any(_DEVICES.glob("nvidia[0-9]*")) or ((_DEVICES / "dxg").exists() and _WSL_CUDA.exists())
