"""The engine thread's routing, with a fake engine. `stop` ends the thread after all that was submitted."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from paceline.core.clock import ManualClock
from paceline.core.errors import InvalidArgumentError, StaleEpochError
from paceline.core.messages import CloseSequence, SequenceFailed, VerifyAhead
from paceline.engine.cancel import CancelToken
from paceline.engine.scheduling import engine_thread
from paceline.engine.scheduling.engine_thread import EngineThread
from paceline.rpc.streams.worker_stream import MAX_IDLE_SECONDS


@dataclass(frozen=True)
class Work:
    """A command that is answered by a later step."""

    sequence_id: str
    epoch: int = 1


@dataclass(frozen=True)
class Done:
    """Its answer."""

    sequence_id: str


class FakeEngine:
    """Holds every sequence it is given work for, fences old epochs, answers one command a step."""

    def __init__(self) -> None:
        self.epochs: dict[str, int] = {}
        self.todo: list[str] = []
        self.dropped: list[str] = []
        self.expirations = 0
        self.announced: list[Any] = []
        self.waits: Callable[[int], float] = lambda todo: 0.0
        """How long, with so much to do."""
        self.todo_at_steps: list[int] = []
        self.threads: set[int] = set()
        self.fails_on: str | None = None
        self.cancel = CancelToken()
        self.stopped_at_steps: list[bool] = []

    @property
    def has_work(self) -> bool:
        return bool(self.todo)

    def handle(self, command: Any, arrived: float) -> list[Any]:
        self.threads.add(threading.get_ident())
        known = self.epochs.get(command.sequence_id, 0)
        if isinstance(command, CloseSequence):
            if command.epoch >= known:
                self.epochs.pop(command.sequence_id, None)
            return []
        if isinstance(command, VerifyAhead):
            return []
        if command.epoch < known:
            return [SequenceFailed(command.sequence_id, command.epoch, 0, StaleEpochError("old"))]
        self.epochs[command.sequence_id] = command.epoch
        self.todo.append(command.sequence_id)
        return []

    def step(self) -> list[Any]:
        self.threads.add(threading.get_ident())
        self.todo_at_steps.append(len(self.todo))
        self.stopped_at_steps.append(self.cancel.cancelled)
        name = self.todo.pop(0)
        if name == self.fails_on:
            raise RuntimeError("the engine is broken")
        return [Done(name)] if name in self.epochs else []

    def batching_delay(self) -> float:
        return self.waits(len(self.todo))

    def reset_cancel(self) -> None:
        self.cancel.reset()

    def notify(self, commands: Sequence[Any]) -> None:
        self.announced.extend(commands)
        self.cancel.cancel()

    def holds(self, sequence_id: str) -> bool:
        return sequence_id in self.epochs

    def drop(self, sequence_id: str) -> None:
        self.dropped.append(sequence_id)
        self.epochs.pop(sequence_id, None)

    def expire(self) -> None:
        self.expirations += 1


class Stream:
    """Where the events of one stream end up."""

    def __init__(self) -> None:
        self.frames: list[list[Any]] = []

    def __call__(self, events: Sequence[Any]) -> None:
        self.frames.append(list(events))

    @property
    def events(self) -> list[Any]:
        return [event for frame in self.frames for event in frame]


class Case:
    """An engine thread that takes up everything submitted before `finish`, in order."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.clock = ManualClock()
        self.it: EngineThread[Any, Any] = EngineThread(self.engine, "engine", self.clock)

    def submit(self, stream: Stream, *commands: Any) -> None:
        self.it.submit(stream, list(commands))

    def step(self) -> None:
        """A step between two submissions: the inbox is drained before every step."""
        self.it.ask(lambda: self.it._send(self.engine.step()))

    def finish(self) -> None:
        self.it.start()
        assert self.it.stop()


def test_events_reach_the_stream_of_their_command() -> None:
    case, one, two = Case(), Stream(), Stream()
    case.submit(one, Work("a"), Work("b"))
    case.submit(two, Work("c"))
    for _ in range(3):
        case.step()
    case.finish()
    assert one.events == [Done("a"), Done("b")]
    assert two.events == [Done("c")]


def test_the_engine_is_told_at_once_of_waiting_commands() -> None:
    case = Case()
    case.submit(Stream(), Work("a"), Work("b"))
    assert case.engine.announced == [Work("a"), Work("b")]
    assert not case.engine.has_work
    case.finish()


def test_everything_runs_on_the_engine_thread() -> None:
    case = Case()
    case.submit(Stream(), Work("a"))
    case.step()
    case.finish()
    assert len(case.engine.threads) == 1
    assert threading.get_ident() not in case.engine.threads


@pytest.mark.parametrize("in_use", [True, False])
def test_the_thread_uses_its_makers_device(in_use: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread's current device is the first one by default."""
    current: dict[int, str] = {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: current.update({threading.get_ident(): str(device)})
    )
    case = Case()
    case.submit(Stream(), Work("a"))
    case.step()
    case.finish()
    assert current == ({case.engine.threads.pop(): "cuda:1"} if in_use else {})


def test_an_unparsable_command_is_answered_to_its_stream() -> None:
    case, one, two = Case(), Stream(), Stream()
    refused = SequenceFailed("a", 1, 3, InvalidArgumentError("proposal", "bad"))
    case.submit(one, refused, Work("b"))
    case.submit(two, Work("a"))
    case.step()
    case.step()
    case.finish()
    assert one.events == [refused, Done("b")]
    assert two.events == [Done("a")]


def test_a_streams_end_drops_only_its_sequences() -> None:
    case, one, two = Case(), Stream(), Stream()
    case.submit(one, Work("a"), Work("b"))
    case.submit(two, Work("c"))
    case.it.leave(one)
    for _ in range(3):
        case.step()
    case.finish()
    assert case.engine.dropped == ["a", "b"]
    assert (one.events, two.events) == ([], [Done("c")])


def test_a_closed_sequence_is_not_dropped_with_its_stream() -> None:
    case, one = Case(), Stream()
    case.submit(one, Work("a"), CloseSequence("a", 1))
    case.it.leave(one)
    case.finish()
    assert case.engine.dropped == []


def test_a_sequence_moves_to_the_stream_that_reopens_it() -> None:
    case, old, new = Case(), Stream(), Stream()
    case.submit(old, Work("a", epoch=1))
    case.submit(new, Work("a", epoch=2))
    case.it.leave(old)
    case.step()
    case.step()
    case.finish()
    assert case.engine.dropped == []
    assert (old.events, new.events) == ([], [Done("a"), Done("a")])


@pytest.mark.parametrize(
    "late",
    [
        Work("a", epoch=1),
        CloseSequence("a", 1),
        SequenceFailed("a", 1, 1, InvalidArgumentError("proposal", "bad")),
        VerifyAhead("a", 1, 1, 1, {}),
    ],
    ids=lambda late: type(late).__name__,
)
def test_a_stale_streams_command_does_not_take_the_sequence(late: Any) -> None:
    """The end of the old stream must not drop the new one's sequence."""
    case, old, new = Case(), Stream(), Stream()
    case.submit(old, Work("a", epoch=1))
    case.submit(new, Work("a", epoch=2))
    case.submit(old, late)
    case.it.leave(old)
    case.step()
    case.step()
    case.finish()
    assert case.engine.dropped == []
    assert new.events == [Done("a"), Done("a")]
    assert all(isinstance(event, SequenceFailed) for event in old.events)
    assert len(old.events) == (0 if isinstance(late, CloseSequence | VerifyAhead) else 1)


def test_events_of_one_step_are_one_frame_per_stream() -> None:
    case, one = Case(), Stream()
    refused = [SequenceFailed(name, 1, 1, InvalidArgumentError("x", "bad")) for name in "abc"]
    case.submit(one, *refused)
    case.finish()
    assert one.frames == [refused]


def test_work_is_done_without_further_commands() -> None:
    case, one = Case(), Stream()
    finished = threading.Event()

    def route(events: Sequence[Any]) -> None:
        one(events)
        if len(one.events) == 2:
            finished.set()

    case.it.submit(route, [Work("a"), Work("b")])
    case.it.start()
    assert finished.wait(60)
    case.it.stop()
    assert one.events == [Done("a"), Done("b")]


def test_leases_are_checked_on_a_busy_worker() -> None:
    """Not only after a second without commands."""
    case = Case()
    for _ in range(10):
        case.it.ask(lambda: case.clock.advance(engine_thread.IDLE_SECONDS / 2))
        case.submit(Stream(), Work("a"))
    case.finish()
    assert case.engine.expirations == 5


def test_progress_is_measured_by_the_clock() -> None:
    case = Case()
    case.clock.advance(7)
    assert case.it.seconds_since_progress == 7


def test_an_idle_worker_answering_queries_makes_progress() -> None:
    """It must not be reported as stuck."""
    case, seen = Case(), []
    for _ in range(100):
        case.it.ask(lambda: seen.append(case.it.seconds_since_progress))
        case.it.ask(lambda: case.clock.advance(0.9))
    case.finish()
    assert max(seen) < MAX_IDLE_SECONDS


def test_a_slow_query_is_no_progress() -> None:
    case, seen = Case(), []

    def hangs() -> None:
        case.clock.advance(MAX_IDLE_SECONDS)
        seen.append(case.it.seconds_since_progress)

    case.it.ask(hangs)
    case.it.ask(lambda: seen.append(case.it.seconds_since_progress))
    case.finish()
    assert seen == [MAX_IDLE_SECONDS, 0.0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_crash_is_reported() -> None:
    case, died = Case(), threading.Event()
    case.engine.fails_on = "a"
    case.it.on_death = died.set
    case.submit(Stream(), Work("a"))
    case.it.start()
    assert died.wait(60)
    case.it.stop()


def test_a_step_waits_for_expected_commands() -> None:
    case, stream = Case(), Stream()
    waiting, done = threading.Event(), threading.Event()

    def waits(todo: int) -> float:
        waiting.set()
        return 60.0 if todo == 1 and not stream.events else 0.0

    def route(events: Sequence[Any]) -> None:
        stream(events)
        if len(stream.events) == 2:
            done.set()

    case.engine.waits = waits
    case.it.submit(route, [Work("a")])
    case.it.start()
    assert waiting.wait(60)
    case.it.submit(route, [Work("b")])
    assert done.wait(60)
    case.it.stop()
    assert case.engine.todo_at_steps == [2, 1]


def test_a_step_begins_when_the_wait_is_over() -> None:
    case, stream = Case(), Stream()
    waits = [0.002, 0.001]
    case.engine.waits = lambda todo: waits.pop(0) if waits else 0.0
    done = threading.Event()

    def route(events: Sequence[Any]) -> None:
        stream(events)
        done.set()

    case.it.submit(route, [Work("a")])
    case.it.start()
    assert done.wait(60)
    case.it.stop()
    assert stream.events == [Done("a")]
    assert not waits


def test_a_stuck_thread_is_not_awaited_forever() -> None:
    case, moves = Case(), threading.Event()
    case.it.ask(moves.wait)  # type: ignore[arg-type]
    case.it.start()
    assert not case.it.stop(0.01)
    moves.set()
    assert case.it.stop(60)


def test_a_command_arriving_late_stops_the_step() -> None:
    """It must not wait for all the work that the step finds."""
    case, stream, done = Case(), Stream(), threading.Event()
    late = [Work("b")]

    def route(events: Sequence[Any]) -> None:
        stream(events)
        if len(stream.events) == 2:
            done.set()

    class Inbox(queue.SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            try:
                return super().get(block, timeout)
            except queue.Empty:
                if late and not block:
                    case.it.submit(route, [late.pop()])
                raise

    case.it._inbox = Inbox()
    case.it.submit(route, [Work("a")])
    case.it.start()
    assert done.wait(60)
    case.it.stop()
    assert case.engine.stopped_at_steps == [True, False]
