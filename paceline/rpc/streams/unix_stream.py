"""A worker's stream over a Unix socket: the frames of its gRPC stream, for coordinators on the same machine.

gRPC passes messages between threads and takes as much processor time as everything else in a small round
outside the models. Here, the producing thread writes a frame and the receiving event loop reads it, with only
the kernel in between.

    frame:   4 bytes, little endian: the length of the message; then the message
    first:   the worker's instance id, so that a coordinator does not talk to a different worker

There is no other authentication: every process that can open the socket's file may use the worker. Only its
user can open the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError, Message

from paceline.core import limits
from paceline.core.clock import Clock, monotonic
from paceline.core.errors import InvalidArgumentError, PacelineError, UnavailableError
from paceline.rpc.streams.frame_split import framed
from paceline.rpc.streams.worker_stream import FrameCodec, StreamEngine

log = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0
"""Pause after a failed accept, for example without free descriptors."""
MAX_UNSENT_BYTES = 8 * limits.MAX_MESSAGE_BYTES
"""Unsent bytes above which a peer that has read nothing for STUCK_SECONDS is disconnected."""
STUCK_SECONDS = 5.0
_LENGTH = 4
_CHUNK = 1 << 16
_BACKLOG = 16


class LocalStream:
    """Bidirectional frames over a connected socket, which it owns. Created and closed on the event loop.

    Also offers the methods of a gRPC call that its users need: `write`, `cancel` and `cancelled`.
    """

    def __init__(
        self, connection: socket.socket, received: Callable[[bytes], None], clock: Clock = monotonic
    ) -> None:
        """`received` is called with every frame, on the event loop; its exceptions end the stream.

        Raises OSError, without taking ownership, if the event loop cannot watch another socket.
        """
        connection.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done when either side has closed; holds the exception of `received`, if any."""
        self._connection = connection
        self._received = received
        self._begun = bytearray()
        """The received part of an incomplete frame."""
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._clock = clock
        self._took_at = 0.0
        """Time at which the peer last read some of `_unsent`."""
        self._closed = self._cancelled = False
        self._loop.add_reader(connection, self._read)

    def send(self, frame: bytes) -> None:
        """Write a frame and buffer what the peer has no room for. Ignored after the end of the stream.

        Thread-safe; frames of one thread arrive in order.
        """
        data = len(frame).to_bytes(_LENGTH, "little") + frame
        with self._lock:
            if self._closed:
                return
            waits = bool(self._unsent)
            sent = 0 if waits else self._sent(data)
            if sent == len(data):
                return
            self._unsent += memoryview(data)[sent:]
            now = self._clock()
            self._took_at = self._took_at if waits else now
            stuck = len(self._unsent) > MAX_UNSENT_BYTES and now - self._took_at > STUCK_SECONDS
        if stuck:
            error = UnavailableError("the peer does not read")
            self._loop.call_soon_threadsafe(self.close, error)
        elif not waits:
            self._loop.call_soon_threadsafe(self._await_room)

    async def write(self, message: Message) -> None:
        """Send a message."""
        self.send(message.SerializeToString())

    def cancel(self) -> None:
        """End the stream. Idempotent."""
        self._cancelled = self._cancelled or not self.ended.done()
        self.close()

    def cancelled(self) -> bool:
        """True if `cancel` ended it."""
        return self._cancelled

    def close(self, error: Exception | None = None) -> None:
        """End the stream. Idempotent; unsent data is lost."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._loop.remove_reader(self._connection)
            self._loop.remove_writer(self._connection)
            self._connection.close()
        if self.ended.done():
            return  # the future was cancelled together with a task that awaited it
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
            self.ended.exception()  # marks it as retrieved even if no task awaits it

    def _sent(self, data: bytes | bytearray) -> int:
        """Number of bytes written. All on a broken connection, whose end the reader reports."""
        try:
            return self._connection.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)

    def _await_room(self) -> None:
        with self._lock:
            if not self._closed:
                self._loop.add_writer(self._connection, self._send_rest)

    def _send_rest(self) -> None:
        with self._lock:
            del self._unsent[: self._sent(self._unsent)]
            self._took_at = self._clock()
            if not self._unsent:
                self._loop.remove_writer(self._connection)

    def _read(self) -> None:
        try:
            data = self._connection.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        try:
            self._take(data)
        except Exception as error:
            self.close(error)

    def _take(self, data: bytes) -> None:
        begun = self._begun
        begun += data
        at = 0
        while len(begun) - at >= _LENGTH and not self._closed:
            length = int.from_bytes(begun[at : at + _LENGTH], "little")
            if length > limits.MAX_MESSAGE_BYTES:
                raise InvalidArgumentError("frame", f"is longer than {limits.MAX_MESSAGE_BYTES} bytes")
            end = at + _LENGTH + length
            if len(begun) < end:
                break
            frame, at = bytes(memoryview(begun)[at + _LENGTH : end]), end
            self._received(frame)
        del begun[:at]


async def connect(
    path: str, instance_id: str, received: Callable[[bytes], None], seconds: float
) -> LocalStream | None:
    """Connect to the worker with this instance id; `received` gets its frames.

    None if the file does not exist (another machine or container) or belongs to another worker, or if this
    process has reached its limit of descriptors or watched sockets.
    """
    try:
        connection = socket.socket(socket.AF_UNIX)
    except OSError:
        return None
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    hello: asyncio.Future[bytes] = loop.create_future()

    def take(frame: bytes) -> None:
        if hello.done():
            received(frame)
        else:
            hello.set_result(frame)

    with contextlib.ExitStack() as undo:
        undo.callback(connection.close)
        try:
            await loop.sock_connect(connection, path)
            stream = LocalStream(connection, take)
        except (OSError, ValueError):  # for example an invalid path
            return None
        undo.callback(stream.close)
        await asyncio.wait((hello, stream.ended), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not hello.done() or hello.result() != instance_id.encode():
            return None
        undo.pop_all()
        return stream


class LocalServer:
    """Serves an engine to coordinators on this machine."""

    def __init__(self, path: str, instance_id: str, engine: StreamEngine, frame_codec: FrameCodec) -> None:
        self.path = path
        self._instance_id = instance_id
        self._engine = engine
        self._dialect = frame_codec
        self._streams: set[LocalStream] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start listening. Raises UnavailableError naming the path."""
        self._listener = _listen(self.path)
        self._accepting = self._do(self._accept(self._listener))

    def stop(self) -> None:
        """End all streams and remove the file."""
        if self._listener is None or self._accepting is None:
            return
        self._accepting.cancel()
        for stream in self._streams:
            stream.close()
        self._listener.close()
        with contextlib.suppress(OSError):
            Path(self.path).unlink()
        self._listener = None

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
                self._serve(connection)
            except OSError as error:
                log.warning("cannot accept a coordinator's connection: %s", error.strerror)
                await asyncio.sleep(PAUSE_SECONDS)

    def _serve(self, connection: socket.socket) -> None:
        """Serve one coordinator's stream until either side ends it. Raises OSError if it cannot start."""
        loop = asyncio.get_running_loop()
        frame_codec, engine = self._dialect, self._engine

        def received(frame: bytes) -> None:
            engine.submit(route, frame_codec.parse(frame_codec.request.FromString(frame)))

        def route(events: Sequence[Any]) -> None:
            try:
                for frame in framed(events, frame_codec.render):
                    stream.send(frame.SerializeToString())
            except Exception as error:
                # Not raised, because the engine thread serves other streams too.
                loop.call_soon_threadsafe(stream.close, error)

        try:
            stream = LocalStream(connection, received)
        except OSError:
            connection.close()
            raise
        self._streams.add(stream)
        stream.send(self._instance_id.encode())
        self._do(self._await_end(stream, route))

    async def _await_end(self, stream: LocalStream, route: Callable[[Sequence[Any]], None]) -> None:
        try:
            await stream.ended
        except (PacelineError, DecodeError) as error:
            log.warning("a coordinator's stream was ended: %s", error)
        except Exception:
            log.exception("a stream broke")
        finally:
            stream.close()
            self._streams.discard(stream)
            self._engine.leave(route)


def _listen(path: str) -> socket.socket:
    most = limits.MAX_SOCKET_PATH_BYTES
    if len(os.fsencode(path)) > most:
        raise UnavailableError(f"cannot listen on {path}: the path is longer than {most} bytes")
    listener = socket.socket(socket.AF_UNIX)
    try:
        _remove_abandoned(path)
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise UnavailableError(f"cannot listen on {path}: {error.strerror}") from None
    listener.setblocking(False)
    return listener


def _remove_abandoned(path: str) -> None:
    """Remove the socket file of a killed process."""
    file = Path(path)
    if not file.exists() or not stat.S_ISSOCK(file.stat().st_mode):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            file.unlink()
