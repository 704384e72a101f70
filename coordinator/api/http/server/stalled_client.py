"""What a client has taken of the answers on its connection, and what becomes of one that takes nothing."""

from __future__ import annotations

import asyncio
from typing import Any


class Taking:
    """A connection's transport that counts what is written, and how much of that has left.

    What is written at once is buffered however long it is, and closing a connection waits until all of it has
    left: for ever, for a client that does not read.
    """

    def __init__(self, transport: asyncio.Transport, seconds: float) -> None:
        """`seconds`: how long a client may take nothing, once it is watched."""
        self._transport = transport
        self._seconds = seconds
        self._written = 0
        self._timer: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send, and count."""
        self._written += len(data)
        self._transport.write(data)

    def watch(self) -> None:
        """From now on drop the connection when its client takes nothing of what is left for too long."""
        if self._timer is None and self._transport.get_write_buffer_size():
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._seconds, self._look_again, self._taken)

    def stop(self) -> None:
        """The connection is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def _taken(self) -> int:
        return self._written - self._transport.get_write_buffer_size()

    def _look_again(self, taken_before: int) -> None:
        self._timer = None
        if self._taken > taken_before:
            self.watch()
        elif self._transport.get_write_buffer_size():
            self._transport.abort()
