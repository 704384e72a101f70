"""The current device of a thread, for CUDA's streams, events and recordings."""

from __future__ import annotations

import torch


def make_current(device: torch.device) -> None:
    """Set the calling thread's device. A CUDA device without a number is the current one."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def keep_attention_from_cudnn(device: torch.device) -> None:
    """Make attention on a CUDA device use torch's own kernels, in the whole process.

    On some devices (H100), 16-bit attention uses cuDNN by default. cuDNN makes a plan for every new shape,
    which takes longer than the pass, and keeps it forever. Nearly every pass that is not recorded has a new
    shape.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def ensure_alive() -> None:
    """Raise the device's error if the calling thread's device can no longer compute.

    For example, after an illegal access every call on a CUDA device fails. The worker can only be restarted,
    and its sequences are opened again elsewhere or after the restart.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def current() -> torch.device:
    """The calling thread's device; the CPU if CUDA is not in use."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
