"""Records a step as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

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

    The next replay of any graph overwrites the result of the previous one. Once all of its graphs are gone, a
    recorder may be unable to record: their memory is freed with the last one.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """`stream`: where steps are recorded, which recorders may share; None makes one."""
        self._device = device
        # One stream for all recordings and for trial runs. Libraries allocate a workspace for each stream: a
        # stream for each recording would add up, and a workspace first allocated during a recording would
        # occupy the graphs' memory permanently.
        self._stream = torch.cuda.Stream(device) if stream is None else stream  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step()  # libraries choose their algorithms and allocate workspaces
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = step()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay
