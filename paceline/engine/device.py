"""The current device of a thread, its state and its free memory."""

from __future__ import annotations

import contextlib

import torch

from paceline.engine.memory import available_bytes


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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, its driver, a library on it or the system had no memory."""
    texts = ("out of memory", "ALLOC_FAILED", "allocate memory")
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    )


def free_bytes(device: torch.device) -> int | None:
    """Bytes that this process can allocate on `device`, those that torch keeps for it included; None if
    unknown."""
    if device.type != "cuda":
        return available_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    with contextlib.suppress(RuntimeError):
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free


def current() -> torch.device:
    """The calling thread's device; the CPU if CUDA is not in use."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
