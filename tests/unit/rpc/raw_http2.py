"""An HTTP/2 client that sends what no library would."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, SETTINGS, DATA = 1, 4, 0
ACKNOWLEDGED, END_STREAM, END_HEADERS = 1, 1, 4
NO_WINDOW = struct.pack(">HI", 4, 0)
"""A setting: nothing may be sent in answer to a call."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def call(path: bytes, message: bytes | None = None) -> bytes:
    """The frames of a call; with a message all of it, without one only its head."""
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": path,
        b":authority": b"x",
        b"content-type": b"application/grpc",
        b"te": b"trailers",
    }
    literal = b"".join(
        b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in fields.items()
    )
    if message is None:
        return frame(HEADERS, END_HEADERS | END_STREAM, 1, literal)
    data = b"\x00" + struct.pack(">I", len(message)) + message
    return frame(HEADERS, END_HEADERS, 1, literal) + frame(DATA, END_STREAM, 1, data)


@contextlib.asynccontextmanager
async def calling(
    address: str, path: bytes, message: bytes | None = None, settings: bytes = b""
) -> AsyncIterator[asyncio.StreamReader]:
    """A connection on which this one call was begun."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(SETTINGS, ACKNOWLEDGED, 0))
        writer.write(call(path, message))
        yield reader
    finally:
        writer.close()


async def read_until(reader: asyncio.StreamReader, part: bytes) -> bytes:
    """What comes, up to one with `part`, or the end."""
    came = b""
    while part not in came and (data := await reader.read(4096)):
        came += data
    return came


RST_STREAM, PING, GOAWAY, WINDOW_UPDATE = 3, 6, 7, 8


class Connection:
    """One connection with as many calls as a test likes, whose messages need not end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._next = 1
        self._windows: dict[int, int] = {0: 65_535}
        self._initial = 65_535
        self._moved = asyncio.Event()
        self.ended: dict[int, bytes] = {}
        """What the server said last of each call that is over: its headers, or nothing."""
        self.farewells: list[int] = []
        """Error codes of what announced the end of the connection; 0 is no error."""
        self.gone = False
        """The server has closed the connection."""
        self._headers: dict[int, bytes] = {}
        writer.write(PREFACE + frame(SETTINGS, 0, 0))
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await self._reader.readexactly(9)
                kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
                payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                self._take(kind, flags, stream, payload)
                self._moved.set()
        self.gone = True
        self._moved.set()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACKNOWLEDGED:
            for begin in range(0, len(payload), 6):
                key, value = struct.unpack_from(">HI", payload, begin)
                self._initial = value if key == 4 else self._initial
            self._writer.write(frame(SETTINGS, ACKNOWLEDGED, 0))
        elif kind == PING and not flags & ACKNOWLEDGED:
            self._writer.write(frame(PING, ACKNOWLEDGED, 0, payload))
        elif kind == GOAWAY:
            self.farewells.append(int.from_bytes(payload[4:8], "big"))
        elif kind == WINDOW_UPDATE:
            self._windows[stream] = self._windows.get(stream, self._initial) + int.from_bytes(payload, "big")
        elif kind == HEADERS:
            self._headers[stream] = self._headers.get(stream, b"") + payload
        if (kind == HEADERS and flags & END_STREAM) or kind == RST_STREAM:
            self.ended.setdefault(stream, self._headers.get(stream, b""))

    def begin(self, path: bytes, more: bytes = b"") -> int:
        """The head of a call; `more` are further headers, encoded."""
        stream, self._next = self._next, self._next + 2
        head = call(path)
        # Without the flag that ends the stream, and with a number of its own.
        self._writer.write(frame(HEADERS, END_HEADERS, stream, head[9:] + more))
        return stream

    async def send(self, stream: int, data: bytes, flags: int = 0) -> bool:
        """As much as the server lets come. False where the call or the connection ends before."""
        while data:
            while (room := min(self._windows[0], self._windows.get(stream, self._initial))) <= 0:
                if self.gone or stream in self.ended:
                    return False
                self._moved.clear()
                await self._moved.wait()
            if self.gone or stream in self.ended:
                return False
            part, data = data[: min(room, 16_384)], data[min(room, 16_384) :]
            self._windows[0] -= len(part)
            self._windows[stream] = self._windows.get(stream, self._initial) - len(part)
            self._writer.write(frame(DATA, 0 if data else flags, stream, part))
            with contextlib.suppress(OSError):
                await self._writer.drain()
        return True

    async def half(self, path: bytes, said: int, sent: int = 0) -> int:
        """A call with a message that says to have `said` bytes, of which `sent` come."""
        stream = self.begin(path)
        await self.send(stream, b"\x00" + struct.pack(">I", said) + b"x" * sent)
        return stream

    async def end_of(self, stream: int) -> bytes:
        """The headers of a call that is over. Raises ConnectionError where the connection ends before."""
        await self._until(lambda: stream in self.ended)
        return self.ended[stream]

    async def ends(self, count: int) -> list[bytes]:
        """The same of all calls that are over, once there are so many."""
        await self._until(lambda: len(self.ended) >= count)
        return list(self.ended.values())

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            if self.gone:
                raise ConnectionError
            self._moved.clear()
            await self._moved.wait()

    async def closed(self) -> None:
        """Until the server has closed the connection."""
        while not self.gone:
            self._moved.clear()
            await self._moved.wait()

    async def close(self) -> None:
        """End it."""
        self._task.cancel()
        self._writer.close()
        await asyncio.gather(self._task, return_exceptions=True)


async def connect(address: str) -> Connection:
    """A connection on which nothing was begun."""
    host, _, port = address.rpartition(":")
    return Connection(*await asyncio.open_connection(host, int(port)))
