"""Recordings: their streams, memory and recorders."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.engine.backends.attention import inspect_attention
from paceline.engine.backends.captured import PATIENCE, CudaGraphs, room_for_logits
from paceline.engine.backends.captured.recording import Step
from paceline.engine.cache import PagedCache
from paceline.engine.layout import SequenceInput
from paceline.engine.loading import model as loading
from paceline.engine.loading.build import _recorders
from paceline.engine.loading.model import make_runner
from paceline.engine.runner import ModelRunner
from tests.unit.engine.runners import captured_of, recording_runner
from tests.unit.engine.test_captured import Tracer
from tests.unit.engine.test_runner import VOCAB, Models, Reference, assert_close, feed, models, reference

__all__ = ["models", "reference"]

CPU = torch.device("cpu")


class FakeStream:
    """Notes whom it waited for."""

    def __init__(self, device: object = None) -> None:
        self.device = device
        self.waited: list[FakeStream] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.waited.append(other)


class FakeCuda:
    """Stands in for what `CudaGraphs` uses of torch.cuda, and notes where steps run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = FakeStream()
        self.made: list[FakeStream] = []
        self.pools = 0
        self.captures: list[dict[str, Any]] = []
        self.sync_debug_modes: list[Any] = [0]
        self.on: FakeStream = self.current
        self.capturing = False
        for name in ("current_stream", "graph_pool_handle", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr(torch.cuda, "Stream", self.new_stream)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(self))
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: self.sync_debug_modes[-1])
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", self.sync_debug_modes.append)

    def new_stream(self, device: object) -> FakeStream:
        self.made.append(FakeStream(device))
        return self.made[-1]

    def current_stream(self, device: object) -> FakeStream:
        return self.on

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.on = self.on, stream
        yield
        self.on = before


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.replays = 0

    def capture_begin(self, pool: int, **asked: Any) -> None:
        self.cuda.captures.append({"pool": pool, "stream": self.cuda.on, **asked})
        self.cuda.capturing = True

    def capture_end(self) -> None:
        self.cuda.capturing = False

    def replay(self) -> None:
        self.replays += 1


def test_steps_are_tried_and_recorded_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own recording stream belongs to the first device."""
    cuda = FakeCuda(monkeypatch)
    graphs = CudaGraphs(torch.device("cuda", 1))
    ran: list[tuple[FakeStream, bool, Any]] = []

    def step() -> Tensor:
        ran.append((cuda.on, cuda.capturing, cuda.sync_debug_modes[-1]))
        return torch.ones(1)

    replays = [graphs(step) for _ in range(3)]
    (stream,) = cuda.made
    assert stream.device == torch.device("cuda", 1)
    assert ran == [(stream, False, "error"), (stream, True, 0)] * 3
    assert stream.waited == [cuda.current] * 3
    assert cuda.current.waited == [stream] * 3, "what follows waits for the trial"
    asked = {"pool": 1, "stream": stream, "capture_error_mode": "thread_local"}
    assert cuda.captures == [asked] * 3
    assert torch.equal(replays[0](), torch.ones(1))
    assert len(ran) == 6, "a replay runs nothing of the step"


def test_recorders_share_their_devices_stream_not_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorder must not record in memory that another one's graphs gave up."""
    cuda = FakeCuda(monkeypatch)
    new_recorder = _recorders(torch.device("cuda"))
    for _ in range(2):
        new_recorder()(lambda: torch.ones(1))
    assert [asked["pool"] for asked in cuda.captures] == [1, 2]
    assert {id(asked["stream"]) for asked in cuda.captures} == {id(stream) for stream in cuda.made}
    assert len(cuda.made) == 1


class Watched(Tracer):
    """Knows which of its recordings are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[weakref.ref[Step]] = []

    def __call__(self, step: Step) -> Step:
        replay = super().__call__(step)
        self.left.append(weakref.ref(replay))
        return replay


def test_comparison_recordings_are_separate_and_freed(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.engine.backends.captured.backend.ROWS", (1, 3))
    made: list[Watched] = []
    alive: list[int] = []

    def new_recorder() -> Watched:
        alive.extend(sum(ref() is not None for ref in recorder.left) for recorder in made)
        made.append(Watched())
        return made[-1]

    gc.disable()
    try:
        runner = make_runner(models("llama"), num_blocks=64, block_size=4, new_recorder=new_recorder)
    finally:
        gc.enable()
    assert captured_of(runner).usable
    # Compared are chunks of two shapes and two sequences in a pass.
    assert [recorder.recordings for recorder in made] == [3, 2]
    assert alive == [0]
    assert all(ref() is not None for ref in made[1].left)


def keeping(results: list[Tensor]) -> Any:
    """A recorder that notes what each recorded step returned, as a graph keeps it."""

    def recorder(step: Step) -> Step:
        results.append(step())
        return step

    return recorder


def recording(models: Models, recorder: Any, room: Tensor | None = None) -> ModelRunner:
    model = models("llama")
    cache = PagedCache(inspect_attention(model), num_blocks=64, block_size=4)
    return recording_runner(model, cache, recorder, room=room)


def test_recorded_passes_share_one_place_for_logits(models: Models, reference: Reference) -> None:
    """The caller gets a copy, which another replay leaves unchanged."""
    results: list[Tensor] = []
    room = room_for_logits(VOCAB, torch.float32, CPU)
    runner = recording(models, keeping(results), room)
    logits = []
    for rows in (5, 1, 2) * (1 + PATIENCE):
        table = runner.new_table()
        logits.append(feed(runner, table, [7] * rows))
        table.free()
    assert len(results) == 3
    assert {result.untyped_storage().data_ptr() for result in results} == {room.untyped_storage().data_ptr()}
    assert len({result.shape for result in results}) == 3
    for rows, told in zip((5, 1, 2) * (1 + PATIENCE), logits, strict=True):
        assert_close(told, reference("llama", [7] * rows))


def test_logits_wider_than_the_weights_keep_their_bits(models: Models, reference: Reference) -> None:
    runner = recording(models, Tracer(), room_for_logits(VOCAB, torch.bfloat16, CPU))
    for _ in range(2 + PATIENCE):
        table = runner.new_table()
        assert_close(feed(runner, table, [7, 8, 9]), reference("llama", [7, 8, 9]))
        table.free()


def test_logits_get_room_before_the_cache_is_sized(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    make, size = room_for_logits, loading.cache_size

    def room(*args: Any) -> Tensor:
        order.append("room")
        return make(*args)

    def sized(*args: Any, **more: Any) -> Any:
        order.append("size")
        return replace(size(*args, **more), num_blocks=64)

    monkeypatch.setattr(loading, "room_for_logits", room)
    monkeypatch.setattr(loading, "cache_size", sized)
    monkeypatch.setattr("paceline.engine.backends.captured.backend.ROWS", (1,))
    results: list[Tensor] = []
    runner = make_runner(models("llama"), new_recorder=lambda: keeping(results))
    assert order == ["room", "size"]
    assert captured_of(runner).usable
    assert len({result.untyped_storage().data_ptr() for result in results}) == 1, "the same for both"
    assert runner.forward([SequenceInput(runner.new_table(), [1], 1)]).shape == (1, VOCAB)
