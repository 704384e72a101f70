"""Reading one call of the asyncio client, such that a cancelled wait loses no message.

gRPC ends a call if one of its reads is cancelled, so a separate task reads the call. It reads at most two
messages ahead, so that the server notices a client that does not read. There is one task per call, because a
task per message would slow down every chunk.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

import grpc

from paceline.client.channel import readable, translated
from paceline.core.errors import PacelineError
from paceline.v1 import generation_pb2

Call = grpc.aio.UnaryStreamCall[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse]


class CallMessages:
    """The messages of one call, for one reader at a time. Holds no reference to the stream, so that a dropped
    stream is freed."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._task: asyncio.Task[None] | None = None
        self._arrived: deque[generation_pb2.GenerateResponse | PacelineError | None] = deque()
        """At most one message, then the end of the call: an error, or None."""
        self._here = asyncio.Event()
        """Set if something has arrived or the call has ended."""
        self._room = asyncio.Event()

    async def next(self) -> generation_pb2.GenerateResponse | None:
        """Wait for the next message; None at the end. Raises PacelineError."""
        if self._task is None:
            here = self._here
            self._task = asyncio.create_task(self._read())
            self._task.add_done_callback(lambda _: here.set())
        await self._here.wait()
        if not self._arrived:
            with translated():
                self._task.result()
            return None
        arrived = self._arrived.popleft()
        if not self._arrived and not self._task.done():
            self._here.clear()
        self._room.set()
        try:
            if isinstance(arrived, PacelineError):
                raise arrived
            return arrived
        finally:
            del arrived  # an error referenced by its own traceback would keep the stream alive

    async def _read(self) -> None:
        try:
            with translated():
                async for message in self._call:
                    if self._arrived:
                        self._room.clear()
                        await self._room.wait()
                    self._arrived.append(readable(message))
                    self._here.set()
            self._arrived.append(None)
        except PacelineError as error:
            # Not raised, because no reader may retrieve the task's exception.
            self._arrived.append(error)

    def cancel(self) -> None:
        """End the call and wake the reader. Safe in any thread and after the event loop has closed."""
        self._call.cancel()
        if self._task is not None and not self._task.done():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)
