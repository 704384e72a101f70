"""A client of HTTP/2 that sends what no library would."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator

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
