"""The gRPC stream of a worker: one bidirectional stream per coordinator, for many sequences.

Commands go to the engine thread frame by frame. A frame of events has all that are ready, so the number of
messages depends on the worker's steps, not on the number of requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message

from paceline.core.errors import InternalError, PacelineError, UnavailableError
from paceline.rpc.codec.status import abort
from paceline.rpc.streams.frame_split import framed

log = logging.getLogger(__name__)

MAX_IDLE_SECONDS = 30.0
"""Time without progress of the engine thread after which a worker is not ready."""
WATCH_SECONDS = 1.0


class StreamEngine(Protocol):
    """The engine thread as used by streams."""

    @property
    def seconds_since_progress(self) -> float:
        """Seconds since the last iteration of the engine's loop."""

    def submit(self, route: Callable[[Sequence[Any]], None], commands: Sequence[Any]) -> None:
        """Queue commands of one stream."""

    def leave(self, route: Callable[[Sequence[Any]], None]) -> None:
        """Report the end of a stream."""

    def ask(self, question: Callable[[], None]) -> None:
        """Run `question` on the engine thread between steps."""


@dataclass(frozen=True, slots=True)
class FrameCodec:
    """Encoding of a worker's stream, independent of the transport."""

    request: type[Message]
    parse: Callable[[Any], Sequence[Any]]
    """The commands of a request. Raises InvalidArgumentError for an invalid frame."""
    render: Callable[[Sequence[Any]], Any]
    """The response message of a list of events."""


async def serve_stream(
    requests: AsyncIterator[Any],
    context: grpc.aio.ServicerContext[Any, Any],
    engine: StreamEngine,
    frame_codec: FrameCodec,
    stopping: asyncio.Event,
) -> AsyncIterator[Any]:
    """Serve one coordinator's stream until either side ends it.

    A stopping worker ends it at once; the coordinator then reopens its sequences elsewhere, or later.
    """
    loop = asyncio.get_running_loop()
    outbox: list[Any] = []
    ready = asyncio.Event()
    ended: list[PacelineError | None] = []

    def take(events: Sequence[Any]) -> None:
        outbox.extend(events)
        ready.set()

    def end(error: PacelineError | None) -> None:
        ended.append(error)
        ready.set()

    def route(events: Sequence[Any]) -> None:
        loop.call_soon_threadsafe(take, list(events))

    async def read() -> None:
        try:
            async for frame in requests:
                engine.submit(route, frame_codec.parse(frame))
        except PacelineError as error:
            end(error)
        except Exception:
            if not ended:  # else the reader sees this side's end
                log.exception("a stream broke")
                end(InternalError("the stream broke"))
        else:
            end(None)

    async def leave() -> None:
        await stopping.wait()
        end(UnavailableError("the worker is stopping"))

    tasks = [asyncio.create_task(read()), asyncio.create_task(leave())]
    try:
        while not ended:
            await ready.wait()
            ready.clear()
            if outbox:
                events = outbox.copy()
                outbox.clear()
                for frame in framed(events, frame_codec.render):
                    yield frame
        if ended[0] is not None:
            await abort(context, ended[0])
    finally:
        for task in tasks:
            task.cancel()
        engine.leave(route)


async def ask(engine: StreamEngine, question: Callable[[], Any]) -> Any:
    """The result of `question`, called on the engine thread between two steps."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any) -> None:
        if not future.done():
            future.set_result(value)

    def run() -> None:
        loop.call_soon_threadsafe(settle, question())

    engine.ask(run)
    return await future


async def watch_progress(engine: StreamEngine, set_serving: Callable[[bool], Any]) -> None:
    """Set readiness by the engine thread's progress: off if it is stuck, on if it moves again."""
    serving = True
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        moving = engine.seconds_since_progress < MAX_IDLE_SECONDS
        if moving != serving:
            log.warning("the engine thread %s", "is running again" if moving else "is stuck")
            await set_serving(moving)
            serving = moving
