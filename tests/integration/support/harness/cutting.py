"""A TCP proxy that resets its connections, like a broken network."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from harness.waiting import HANG

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of no time: closing sends RST instead of FIN, and drops what was not sent yet."""


READ = 65536


class CuttingProxy:
    """Carries bytes to `upstream` and back, in a thread of its own.

    Each connection is reset once it has carried down as many bytes as the next of `limits` says; with no
    limit left it is carried whole. So where a stream breaks depends on what was sent, not on when a reader
    that waits for a core gets to say so.
    """

    def __init__(self, upstream: str, limits: Iterable[int]) -> None:
        host, port = upstream.rsplit(":", 1)
        self._upstream = (host, int(port))
        self._limits = iter(limits)
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._carrying: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def _do(self, work: object) -> asyncio.Server:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(HANG)  # type: ignore[arg-type]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection(*self._upstream)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, up_writer}
        for work in (
            self._carry(reader, up_writer),
            self._carry_down(up_reader, writer, up_writer, next(self._limits, None)),
        ):
            task = asyncio.create_task(work)
            self._carrying.add(task)
            task.add_done_callback(self._carrying.discard)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(READ):
                sink.write(data)
                await sink.drain()
        sink.close()
        self._writers.discard(sink)

    async def _carry_down(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        up: asyncio.StreamWriter,
        limit: int | None,
    ) -> None:
        if limit is not None:
            with contextlib.suppress(OSError):
                while limit > 0 and (data := await source.read(min(READ, limit))):
                    sink.write(data)
                    await sink.drain()
                    limit -= len(data)
            if limit == 0:
                self._reset({sink, up})
                return
        await self._carry(source, sink)

    def _reset(self, writers: set[asyncio.StreamWriter]) -> None:
        for writer in writers:
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()
        self._writers -= writers

    async def _stop(self) -> None:
        self._server.close()
        self._reset(set(self._writers))
        await asyncio.gather(*self._carrying, return_exceptions=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(HANG)
        self._loop.close()
