"""The engine thread, which alone touches a worker's state and tensors.

gRPC runs on asyncio in the main thread and passes commands through a queue. The loop drains the commands,
runs one step, and returns the events. A command that arrives during a step waits for the end of the step at
most. The engine is notified at once, so that the step itself can react.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from paceline.core.clock import Clock, monotonic
from paceline.core.messages import CloseSequence, SequenceFailed, VerifyAhead
from paceline.engine import device

log = logging.getLogger(__name__)

Command = TypeVar("Command", contravariant=True)
Event = TypeVar("Event")
IDLE_SECONDS = 1.0
"""Interval between a worker's checks of its leases."""


class Engine(Protocol[Command, Event]):
    """A worker without sockets and threads."""

    @property
    def has_work(self) -> bool:
        """True if `step` has work to do."""

    def handle(self, command: Command, arrived: float) -> list[Event]:
        """Process a command without a pass. Returns the events that need no pass."""

    def step(self) -> list[Event]:
        """Run one pass and return its events."""

    def batching_delay(self) -> float:
        """Seconds that the step may wait for commands that are about to arrive; 0 to begin it now."""

    def reset_cancel(self) -> None:
        """Clear the notifications; called before each check of the queue.

        A notification after the last check is therefore still known in the step.
        """

    def notify(self, commands: Sequence[Command | SequenceFailed]) -> None:
        """Commands are waiting. Called on another thread than all other methods, possibly during a step."""

    def holds(self, sequence_id: str) -> bool:
        """True while the worker holds the sequence."""

    def drop(self, sequence_id: str) -> None:
        """Drop a sequence whose coordinator is gone."""

    def expire(self) -> None:
        """Drop the sequences whose lease has expired."""


Route = Callable[[Sequence[Any]], None]
"""Takes the events of one stream; called on the engine thread."""


class EngineThread(Generic[Command, Event]):
    """Owns an engine; other code uses it through `submit`, `leave` and `ask`."""

    def __init__(self, engine: Engine[Command, Event], name: str, clock: Clock = monotonic) -> None:
        """The engine works on the current device of the thread that creates it."""
        self._engine = engine
        self._clock = clock
        self._device = device.current()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._routes: dict[str, Route] = {}
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._outgoing: dict[Route, list[Any]] = {}
        self._passed_at = self._expired_at = clock()
        self.on_death: Callable[[], None] | None = None
        self.around_step: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        """Entered around each step. Only the engine thread may change it: a profile marks steps with it."""

    def start(self) -> None:
        """Start the thread; call once."""
        self._thread.start()

    def stop(self, timeout: float | None = None) -> bool:
        """Finish the current step, then end the thread. Returns False if that exceeds `timeout`."""
        self._inbox.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def seconds_since_progress(self) -> float:
        """Seconds since the last iteration of the loop: readiness requires progress."""
        return self._clock() - self._passed_at

    def submit(self, route: Route, commands: Sequence[Command | SequenceFailed]) -> None:
        """Queue commands of one stream. A SequenceFailed among them is returned directly."""
        arrived = self._clock()
        self._inbox.put(lambda: self._take(route, commands, arrived))
        self._engine.notify(commands)

    def leave(self, route: Route) -> None:
        """The stream ended, so its sequences have no user any more."""
        self._inbox.put(lambda: self._forget(route))

    def ask(self, question: Callable[[], None]) -> None:
        """Run `question` on the engine thread between steps."""
        self._inbox.put(question)

    def _run(self) -> None:
        try:
            device.make_current(self._device)  # new threads start on the first device
            while self._drain():
                if self._engine.has_work:
                    with self.around_step():
                        self._send(self._engine.step())
                        self._flush()
        except BaseException:
            log.exception("the engine thread died")
            if self.on_death is not None:
                self.on_death()
            raise

    def _drain(self) -> bool:
        """Process all waiting commands, and those worth waiting for. Returns False to stop."""
        while True:
            now = self._passed_at = self._clock()
            self._expire(now)
            delay = self._delay()
            self._engine.reset_cancel()
            try:
                task = self._inbox.get(block=delay > 0, timeout=delay)
            except queue.Empty:
                if delay == 0:
                    return True
                continue
            if task is None:
                return False
            task()
            self._flush()

    def _delay(self) -> float:
        return min(self._engine.batching_delay(), IDLE_SECONDS) if self._engine.has_work else IDLE_SECONDS

    def _expire(self, now: float) -> None:
        """Check the leases periodically, however busy the worker is."""
        if now - self._expired_at >= IDLE_SECONDS:
            self._engine.expire()
            self._expired_at = now

    def _take(self, route: Route, commands: Sequence[Any], arrived: float) -> None:
        for command in commands:
            sequence_id = command.sequence_id
            owner = self._routes.get(sequence_id, route)
            self._routes[sequence_id] = route
            refused = isinstance(command, SequenceFailed)
            events = [command] if refused else self._engine.handle(command, arrived)
            self._send(events)
            if not self._engine.holds(sequence_id):
                del self._routes[sequence_id]
            elif isinstance(command, CloseSequence | VerifyAhead) or any(
                isinstance(e, SequenceFailed) for e in events
            ):
                # A stream with a stale epoch must not take the sequence from its owner.
                self._routes[sequence_id] = owner

    def _forget(self, route: Route) -> None:
        for sequence_id in [key for key, value in self._routes.items() if value is route]:
            self._engine.drop(sequence_id)
            del self._routes[sequence_id]

    def _send(self, events: Sequence[Any]) -> None:
        for event in events:
            route = self._routes.get(event.sequence_id)
            if route is not None:
                self._outgoing.setdefault(route, []).append(event)

    def _flush(self) -> None:
        for route, events in self._outgoing.items():
            route(events)
        self._outgoing.clear()
