"""The device that a thread works on where nothing names one: for CUDA's streams, events and recordings."""

from __future__ import annotations

import torch


def make_current(device: torch.device) -> None:
    """Have the calling thread work on this device. A CUDA device without a number is the current one."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def keep_attention_from_cudnn(device: torch.device) -> None:
    """Have attention on a CUDA device use torch's own kernels, in the whole process.

    On some devices (H100) 16-bit attention goes to cuDNN by itself. That makes a plan for every new shape,
    which takes longer than the pass, and keeps it for ever; in a pass that is not recorded nearly every shape
    is new.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def ensure_alive() -> None:
    """Raise what the calling thread's device raises if it can compute no more.

    A CUDA device that met an illegal access, for example, fails every call from then on: a worker with such a
    one can only be restarted, and its sequences are opened again elsewhere, or when it is back.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def current() -> torch.device:
    """The calling thread's device; the CPU where CUDA is not in use."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
