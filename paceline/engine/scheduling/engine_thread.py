"""The engine thread: the one place where a worker's state and tensors are touched.

gRPC runs on asyncio in the main thread and hands commands over through a queue. The loop is: drain
the commands, run one step, hand the events back. A command that arrives during a step waits for the
step's end, never longer; the engine is told at once, for what the step itself can make use of.
"""

from __future__ import annotations

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
"""How often a worker looks at its leases."""


class Engine(Protocol[Command, Event]):
    """A worker without sockets and threads."""

    @property
    def has_work(self) -> bool:
        """True when `step` has something to do."""

    def handle(self, command: Command, arrived: float) -> list[Event]:
        """Take a command up: bookkeeping only, no pass. Events that need no pass come back at once."""

    def step(self) -> list[Event]:
        """Run one pass and return what it finished."""

    def batching_delay(self) -> float:
        """Seconds that the step may still wait for commands that are about to come; 0 to begin it."""

    def reset_cancel(self) -> None:
        """All that was announced so far is about to be taken up: called before each look at what waits.

        What is announced after the last look is so still known in the step.
        """

    def notify(self, commands: Sequence[Command | SequenceFailed]) -> None:
        """These wait to be taken up. Called on another thread than all else, maybe during a step."""

    def holds(self, sequence_id: str) -> bool:
        """True while the sequence has state here."""

    def drop(self, sequence_id: str) -> None:
        """Forget a sequence whose coordinator went away."""

    def expire(self) -> None:
        """Drop the sequences whose lease is over."""


Route = Callable[[Sequence[Any]], None]
"""Takes the events of one stream; called on the engine thread."""


class EngineThread(Generic[Command, Event]):
    """Owns an engine; everything else talks to it through `submit`, `leave` and `ask`."""

    def __init__(self, engine: Engine[Command, Event], name: str, clock: Clock = monotonic) -> None:
        """It works on the device of the thread that makes it."""
        self._engine = engine
        self._clock = clock
        self._device = device.current()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._routes: dict[str, Route] = {}
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._outgoing: dict[Route, list[Any]] = {}
        self._passed_at = self._expired_at = clock()
        self.on_death: Callable[[], None] | None = None

    def start(self) -> None:
        """Begin; call once."""
        self._thread.start()

    def stop(self, timeout: float | None = None) -> bool:
        """Finish the step in progress, then end the thread. False if that takes longer than `timeout`."""
        self._inbox.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def seconds_since_progress(self) -> float:
        """How long ago the loop last went round: readiness means forward progress."""
        return self._clock() - self._passed_at

    def submit(self, route: Route, commands: Sequence[Command | SequenceFailed]) -> None:
        """Queue commands of one stream. A SequenceFailed among them goes straight back."""
        arrived = self._clock()
        self._inbox.put(lambda: self._take(route, commands, arrived))
        self._engine.notify(commands)

    def leave(self, route: Route) -> None:
        """The stream ended: nobody is left to use its sequences."""
        self._inbox.put(lambda: self._forget(route))

    def ask(self, question: Callable[[], None]) -> None:
        """Run `question` on the engine thread between steps."""
        self._inbox.put(question)

    def _run(self) -> None:
        try:
            device.make_current(self._device)  # threads begin on the first one
            while self._drain():
                if self._engine.has_work:
                    self._send(self._engine.step())
                    self._flush()
        except BaseException:
            log.exception("the engine thread died")
            if self.on_death is not None:
                self.on_death()
            raise

    def _drain(self) -> bool:
        """Take up all waiting commands, and those worth waiting for. False to stop."""
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
        """Look at the leases now and then, however busy the worker is."""
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
                # A stream that was fenced off does not take the sequence over from the one that owns it.
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
