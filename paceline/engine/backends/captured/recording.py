"""Records a step as a CUDA graph."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

Step = Callable[[], Tensor]
"""Reads and writes tensors at fixed addresses. A step must not read values on the host: host work during the
recording is not repeated by a replay."""


class Recorder(Protocol):
    """Turns a step into one that can be repeated at little cost."""

    def __call__(self, step: Step) -> Step:
        """A step with the same effect, whose result is always at the same address."""


class CudaGraphs:
    """Records on the current device. All graphs share their memory, since no two run at a time.

    The next replay of any graph overwrites the result of the previous one. Whatever fails, no capture stays
    open and the caller's stream is current again.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """`stream`: where steps are recorded, which recorders may share; None makes one."""
        self._device = device
        # One stream for all recordings and for trial runs. Libraries allocate a workspace for each stream: a
        # stream for each recording would add up, and a workspace first allocated during a recording would
        # occupy the graphs' memory permanently.
        self._stream = torch.cuda.Stream(device) if stream is None else stream  # type: ignore[no-untyped-call]
        self._pool: Any = None
        """Handle of the graphs' memory."""
        self._in_pool: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._unfinished: list[torch.cuda.CUDAGraph] = []

    def __call__(self, step: Step) -> Step:
        """Raises the step's error; RuntimeError for a step that waits for the device."""
        self._try(step)
        graph = torch.cuda.CUDAGraph()
        result = self._capture(graph, step)
        self._in_pool.add(graph)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    def _try(self, step: Step) -> None:
        """Run the step once: libraries choose their algorithms and allocate workspaces.

        A wait would make a capture invalid, and torch does not recover from that, so it is an error already
        here.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream), _waits_are_errors():
                step()
        finally:
            current.wait_stream(self._stream)

    def _capture(self, graph: torch.cuda.CUDAGraph, step: Step) -> Tensor:
        if not self._in_pool:
            # The memory of a pool is freed with its last graph, and torch then refuses the pool.
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        # `torch.cuda.graph` leaves its stream current if the capture cannot be ended.
        with torch.cuda.stream(self._stream):
            try:
                # Other threads of the process may use the device meanwhile.
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                result = step()
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
        return result

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a failed capture.

        Ending an invalid capture is an error, after which torch's allocators believe that it continues: they
        would free no memory before an out-of-memory error, refuse the pool, and ask the graph, which has to
        stay.
        """
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
            return
        with contextlib.suppress(RuntimeError):  # raised unless they believe so
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            self._unfinished.append(graph)
            self._in_pool = weakref.WeakSet()


@contextlib.contextmanager
def _waits_are_errors() -> Iterator[None]:
    """Make torch raise RuntimeError where the host would wait for a device, in the whole process."""
    before = torch.cuda.get_sync_debug_mode()
    _set_sync_debug_mode("error")
    try:
        yield
    finally:
        _set_sync_debug_mode(before)


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings(action="ignore"):  # the mode is called experimental
        torch.cuda.set_sync_debug_mode(mode)
