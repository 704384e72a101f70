"""Tracks the bytes that a client has taken, and drops a connection whose client stalls."""

from __future__ import annotations

import asyncio
from typing import Any


class Taking:
    """A connection's transport that counts the bytes written and the bytes sent.

    A write of any length is buffered at once, and closing a connection waits until the buffer is empty. If
    the client does not read, that is forever.
    """

    def __init__(self, transport: asyncio.Transport, seconds: float) -> None:
        """`seconds`: longest time without progress of a watched client."""
        self._transport = transport
        self._seconds = seconds
        self._written = 0
        self._timer: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write the data and count its bytes."""
        self._written += len(data)
        self._transport.write(data)

    def watch(self) -> None:
        """From now on, drop the connection if its client takes none of the remaining bytes for too long."""
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
