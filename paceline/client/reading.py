"""Reading one call of the asyncio client, so that whoever gives up waiting for a message loses nothing.

gRPC ends a call of which a read is cancelled. So a task of its own reads it, at most two messages ahead: the
server must notice a client that takes nothing. It is one task for the call, since one for each message would
show in the time of every chunk.
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
    """The messages of one call, for one reader at a time. Refers to no stream, so that one may be dropped."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._task: asyncio.Task[None] | None = None
        self._arrived: deque[generation_pb2.GenerateResponse | PacelineError | None] = deque()
        """At most one message, then what ended the call: an error, or None."""
        self._here = asyncio.Event()
        """Something has arrived, or will not any more."""
        self._room = asyncio.Event()

    async def next(self) -> generation_pb2.GenerateResponse | None:
        """Wait for the next message; None is the end. Raises PacelineError."""
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
            del arrived  # an error that is in its own traceback would keep the stream

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
            # Not raised: nobody may ask for it.
            self._arrived.append(error)

    def cancel(self) -> None:
        """End the call; whoever waits is told. May be done in any thread, and after the event loop."""
        self._call.cancel()
        if self._task is not None and not self._task.done():
            with contextlib.suppress(RuntimeError):  # a loop that is closed runs nothing
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)
