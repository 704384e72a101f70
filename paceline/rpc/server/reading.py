"""Bounded reading of requests that are single messages.

gRPC waits indefinitely for the rest of a partial message and keeps the received part, up to the message bound
for every call. Here, the number of unfinished messages is bounded so that their parts stay within
`UNFINISHED_BYTES`, and each has a time limit. A further message cancels the oldest unfinished one. Nearly
every message arrives together with its call, so honest callers are not affected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import grpc

from paceline.core import limits
from paceline.core.errors import DeadlineExceededError, InvalidArgumentError, ResourceExhaustedError
from paceline.rpc.security.auth import is_open

UNFINISHED_BYTES: Final = 256 * 1024 * 1024
"""Bound of all unfinished messages together."""
LEAST_UNFINISHED: Final = 8
"""Smallest bound of unfinished messages, for large messages."""
OPEN_SECONDS: Final = 5.0
"""Time limit for the message of a call without authentication."""
SECONDS: Final = 60.0
"""Time limit for any other message."""
LAST_SECONDS: Final = 0.1
"""Extra time for a cancelled message, which may have arrived but not been handled yet."""
LAST_TURNS: Final = 5
"""Extra event loop iterations after that time, in case the loop was blocked."""
RETRY_AFTER_SECONDS: Final = 1.0
MAX_OPEN_REQUEST_BYTES: Final = 8 * limits.MAX_HEALTH_SERVICE_CHARACTERS
"""Message bound of a call without authentication; gRPC's bound applies to all methods of a port."""

Context = grpc.aio.ServicerContext[Any, Any]


class UnfinishedMessages:
    """The unfinished messages of a group of methods."""

    def __init__(self, most: int, seconds: float, max_bytes: Callable[[], int]) -> None:
        """At most `most` unfinished messages, each for at most `seconds` and `max_bytes()` bytes."""
        self._most = most
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._unfinished: dict[asyncio.Future[None], None] = {}
        """Oldest first. The future is set when the message is cancelled."""
        self._reads: set[asyncio.Future[Any]] = set()

    async def one(self, context: Context) -> bytes:
        """Read the single message of a call, which must be served as a request stream.

        Raises DeadlineExceededError after the time limit, ResourceExhaustedError if the message is cancelled,
        InvalidArgumentError if it is too large or missing.
        """
        if len(self._unfinished) >= self._most:
            oldest = next(iter(self._unfinished))
            del self._unfinished[oldest]
            oldest.set_result(None)
        given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unfinished[given_up] = None
        try:
            data = await self._read(context, given_up)
        finally:
            self._unfinished.pop(given_up, None)
        if data is grpc.aio.EOF:
            raise InvalidArgumentError("request", "is required")
        most = self._max_bytes()
        if len(data) > most:
            raise InvalidArgumentError("request", f"at most {most} bytes, got {len(data)}")
        return bytes(data)

    async def _read(self, context: Context, given_up: asyncio.Future[None]) -> Any:
        # Never cancelled, because gRPC leaks the memory of a cancelled operation. It ends with the call.
        read = asyncio.ensure_future(context.read())
        self._reads.add(read)
        read.add_done_callback(self._forget)
        await asyncio.wait((read, given_up), timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED)
        if given_up.done() and not read.done():
            await asyncio.wait((read,), timeout=LAST_SECONDS)
            for _ in range(LAST_TURNS):
                if not read.done():
                    await asyncio.sleep(0)
        if read.done():
            return read.result()
        if given_up.done():
            raise ResourceExhaustedError("too many requests are on their way", RETRY_AFTER_SECONDS)
        raise DeadlineExceededError(f"the request did not arrive within {self._seconds:g} seconds")

    def _forget(self, read: asyncio.Future[Any]) -> None:
        self._reads.discard(read)
        if not read.cancelled():
            read.exception()  # marks it as retrieved after the end of the call


class Readings:
    """The unfinished messages of one port; calls without authentication are counted separately."""

    def __init__(self, message_bytes: int, max_bytes: Callable[[], int] | None = None) -> None:
        """`message_bytes` is gRPC's bound of the port, `max_bytes` a lower bound of requests, if any."""
        most = max(LEAST_UNFINISHED, UNFINISHED_BYTES // message_bytes)
        self._open = UnfinishedMessages(most, OPEN_SECONDS, lambda: MAX_OPEN_REQUEST_BYTES)
        self._others = UnfinishedMessages(most, SECONDS, max_bytes or (lambda: message_bytes))

    def of(self, method: str) -> UnfinishedMessages:
        """The group of a method, by its full name."""
        return self._open if is_open(method) else self._others
