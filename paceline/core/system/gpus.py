"""Which GPUs there can be, told from the system and without a library that could use them."""

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
"""What GPUs are reached through where they have no node of their own: WSL, AMD's, and NVIDIA's Jetson."""
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_HELP: Final = "`auto` takes a GPU where there is one, `cpu` computes on the processor"


def check_gpu(
    field: str, device: str, environment: Mapping[str, str] = os.environ, nodes: Path = _DEVICES
) -> None:
    """Raises InvalidArgumentError naming `field` for a CUDA device that cannot be there.

    One that passes may still not be there: only CUDA knows.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return
    if _torch_build().endswith("+cpu"):
        raise InvalidArgumentError(
            field, f"{device} needs a torch with CUDA, this one ({_torch_build()}) has none; {_HELP}"
        )
    index = int(number or 0)
    if _VISIBLE in environment and index >= (count := _visible(environment[_VISIBLE])):
        raise InvalidArgumentError(
            field, f"{device} is not there: {_VISIBLE}={environment[_VISIBLE]!r} leaves {count} GPUs; {_HELP}"
        )
    if not sys.platform.startswith("linux") or any((nodes / name).exists() for name in _OTHER_NODES):
        return
    there = len(list(nodes.glob("nvidia[0-9]*")))
    if index >= there:
        raise InvalidArgumentError(
            field, f"{device} is not there: this machine shows {there} GPUs ({nodes}/nvidia0, …); {_HELP}"
        )


def _visible(text: str) -> int:
    """As CUDA counts them: up to the first that is none."""
    names = [name.strip() for name in text.split(",")]
    return next((i for i, name in enumerate(names) if not name or name.startswith("-")), len(names))


def _torch_build() -> str:
    """The version of the torch that is installed, such as `2.13.0+cpu`; empty without one."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""
