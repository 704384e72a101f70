"""The device that a thread works on where nothing names one: for CUDA's streams, events and recordings."""

from __future__ import annotations

import torch


def make_current(device: torch.device) -> None:
    """Have the calling thread work on this device. A CUDA device without a number is the current one."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


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
