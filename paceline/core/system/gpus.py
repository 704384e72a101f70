"""Checks for GPUs without loading a GPU library."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

from paceline.core.errors import InvalidArgumentError

_DEVICES: Final = Path("/dev")
_OTHER_NODES: Final = ("dxg", "kfd", "nvhost-gpu", "nvhost-ctrl", "nvmap", "nvgpu")
"""Device nodes of GPUs without an `nvidia<N>` node: WSL, AMD, NVIDIA Jetson."""
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_HELP: Final = "`auto` takes a GPU if there is one, `cpu` computes on the processor"


def check_gpu(
    field: str, device: str, environment: Mapping[str, str] = os.environ, nodes: Path = _DEVICES
) -> None:
    """Raises InvalidArgumentError naming `field` for a CUDA device that cannot exist.

    A device that passes may still be missing: only CUDA knows.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return
    if _torch_build().endswith("+cpu"):
        raise InvalidArgumentError(
            field, f"{device} needs torch with CUDA, but {_torch_build()} has no CUDA; {_HELP}"
        )
    index = int(number or 0)
    if _VISIBLE in environment and index >= (count := _visible(environment[_VISIBLE])):
        raise InvalidArgumentError(
            field, f"{device} not found: {_VISIBLE}={environment[_VISIBLE]!r} leaves {count} GPUs; {_HELP}"
        )
    if not sys.platform.startswith("linux") or any((nodes / name).exists() for name in _OTHER_NODES):
        return
    there = len(list(nodes.glob("nvidia[0-9]*")))
    if index >= there:
        raise InvalidArgumentError(
            field, f"{device} not found: this machine has {there} GPUs ({nodes}/nvidia0, …); {_HELP}"
        )


def _visible(text: str) -> int:
    """Number of devices in CUDA_VISIBLE_DEVICES; as CUDA does, stops at the first invalid one."""
    names = [name.strip() for name in text.split(",")]
    return next((i for i, name in enumerate(names) if not name or name.startswith("-")), len(names))


def _torch_build() -> str:
    """The installed torch version, such as `2.13.0+cpu`; empty without torch."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""
