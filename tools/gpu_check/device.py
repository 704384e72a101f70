"""The device that is checked: a card, or the pretended one of the tests."""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from paceline.engine.backends.captured import CudaGraphs, Recorder
from paceline.engine.device import free_bytes, keep_attention_from_cudnn, make_current


class Device:
    """A CUDA device with what the checks measure on it."""

    pretended = False

    def __init__(self, torch_device: torch.device) -> None:
        self.torch = torch_device
        make_current(torch_device)
        keep_attention_from_cudnn(torch_device)
        self._stream: Any = torch.cuda.Stream(torch_device)

    def new_recorder(self) -> Recorder:
        """A recorder of CUDA graphs; all share a stream, as in a worker."""
        return CudaGraphs(self.torch, self._stream)

    def seconds(self, action: Callable[[], object], repeats: int) -> float:
        """Mean time of `action`, the device's work included."""
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(repeats):
            action()
        torch.cuda.synchronize()
        return (time.perf_counter() - begun) / repeats

    def waits(self, action: Callable[[], object]) -> int:
        """Times that the host waits for the device in `action`."""
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                action()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(each.message) for each in caught)

    @contextlib.contextmanager
    def peak_bytes(self) -> Iterator[Callable[[], int | None]]:
        """Yields a function that gives the most bytes allocated since, above those at the beginning."""
        before = torch.cuda.memory_allocated(self.torch)
        torch.cuda.reset_peak_memory_stats(self.torch)
        yield lambda: torch.cuda.max_memory_allocated(self.torch) - before

    def reserved_peak(self) -> int | None:
        """Most bytes that this process has held of the device since the last `peak_bytes`."""
        return torch.cuda.max_memory_reserved(self.torch)

    def free_bytes(self) -> int:
        """Bytes that this process can still allocate, those that torch keeps included."""
        return free_bytes(self.torch) or 0

    @contextlib.contextmanager
    def exhausted(self) -> Iterator[None]:
        """In the block the device has no more memory for this process than it holds."""
        _, total = torch.cuda.mem_get_info(self.torch)
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved(self.torch) / total, self.torch)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self.torch)


class PretendedDevice(Device):
    """The pretended device of the tests: it has no memory to measure or to use up."""

    pretended = True

    def __init__(self, torch_device: torch.device, pretending: Any) -> None:
        super().__init__(torch_device)
        self._pretending = pretending

    def waits(self, action: Callable[[], object]) -> int:
        """As the pretended device counts them."""
        with self._pretending.counting() as counts:
            action()
        return int(counts.num_waits)

    @contextlib.contextmanager
    def peak_bytes(self) -> Iterator[Callable[[], int | None]]:
        """Unknown."""
        yield lambda: None

    def reserved_peak(self) -> int | None:
        """Unknown."""
        return None

    def free_bytes(self) -> int:
        """As much as small shapes need."""
        return 1 << 30

    @contextlib.contextmanager
    def exhausted(self) -> Iterator[None]:
        """It has no memory that could be used up, so the error is raised at once."""
        raise torch.OutOfMemoryError("no memory is left, as pretended")
        yield


def release() -> None:
    """Give back the memory that nothing holds."""
    gc.collect()
    torch.cuda.empty_cache()


@contextlib.contextmanager
def opened(*, pretend: bool, index: int = 0) -> Iterator[Device]:
    """The device to check. Raises RuntimeError without CUDA, unless `pretend`."""
    where = torch.device("cuda", index)
    if not pretend:
        if not torch.cuda.is_available():
            what = f"torch {torch.__version__} finds no CUDA device"
            raise RuntimeError(f"{what}; --pretend runs the checks on a pretended one")
        yield Device(where)
        return
    # Of the tests, which a bare machine may not have; nothing else of them is used.
    from tests.cuda.device import PretendedCuda

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # its tensors are tiny, and threads would wait for each other on a busy machine
    try:
        with PretendedCuda() as pretending:
            yield PretendedDevice(where, pretending)
    finally:
        torch.set_num_threads(threads)
