"""How a step is recorded: as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Step = Callable[[], Tensor]
"""Reads and writes tensors that stay where they are. Nothing in it may look at a number: what the host does
while a step is recorded, it does no more when the step is replayed."""


class Recorder(Protocol):
    """Makes a step one that can be repeated at little cost."""

    def __call__(self, step: Step) -> Step:
        """A step that does the same; its result lies in the same place each time."""


class CudaGraphs:
    """Records on one device, the current one. All graphs share their memory, since no two run at a time.

    What one graph returned is overwritten by the next replay of any of them. Once all of its graphs are gone
    a recorder may be unable to record: their memory is given up with the last one.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """`stream`: where steps are recorded, which recorders may share; None makes one."""
        self._device = device
        # One for all, and for trying a step out as well. Libraries keep room for themselves for each stream
        # they meet: with a stream for each recording that grows, and where they first meet one while it is
        # recorded, that room is taken from the graphs' memory for good.
        self._stream = torch.cuda.Stream(device) if stream is None else stream  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step()  # libraries choose their algorithms and make room for themselves
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = step()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay
