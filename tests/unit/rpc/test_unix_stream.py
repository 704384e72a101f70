"""Frames over a Unix socket: whole, in order, from any thread; and its peers."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.core import limits
from paceline.core.clock import Clock, ManualClock, monotonic
from paceline.core.errors import InvalidArgumentError, UnavailableError
from paceline.core.messages import CloseSequence, SequenceFailed
from paceline.rpc.streams import frames, unix_stream
from paceline.rpc.streams.unix_stream import PAUSE_SECONDS, STUCK_SECONDS, LocalServer, LocalStream, connect
from paceline.rpc.streams.worker_stream import FrameCodec
from paceline.v1 import target_pb2

SECONDS = 20.0
SIZES = [0, 1, 3, 4, 5, 255, 256, 65_531, 65_532, 65_533, 200_000]
WORKER = "a1b2"


def framed(frame: bytes) -> bytes:
    return len(frame).to_bytes(4, "little") + frame


def frame_of(size: int) -> bytes:
    return bytes(i * 7 % 251 for i in range(size))


async def soon(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0)


async def over(stream: LocalStream) -> None:
    """Until it has ended. Raises what ended it."""
    async with asyncio.timeout(SECONDS):
        await stream.ended


async def received(other: socket.socket, size: int, begun: bytes = b"") -> bytes:
    """So many bytes, of which `begun` have come."""
    data = bytearray(begun)
    async with asyncio.timeout(SECONDS):
        while len(data) < size:
            data += await asyncio.get_running_loop().sock_recv(other, 1 << 16)
    return bytes(data)


async def connected(path: str, received: Callable[[bytes], None] = len, worker: str = WORKER) -> Any:
    """A stream to a server; None where there is none."""
    return await connect(path, worker, received, SECONDS)


def names(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()]


class Ends:
    """A stream, and the other end of its socket as it is."""

    def __init__(self, received: Callable[[bytes], None] | None = None, clock: Clock = monotonic) -> None:
        mine, self.other = socket.socketpair(socket.AF_UNIX)
        self.other.setblocking(False)
        self.frames: list[bytes] = []
        self.stream = LocalStream(mine, received or self.frames.append, clock)

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()
        self.other.close()


# ---- frames ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1 << 20])
async def test_frames_arrive_whole_in_any_pieces(piece: int) -> None:
    sizes = [size for size in SIZES if size < 1000 or piece > 1000]
    data = b"".join(framed(frame_of(size)) for size in sizes)
    with Ends() as ends:
        loop = asyncio.get_running_loop()
        for at in range(0, len(data), piece):
            await loop.sock_sendall(ends.other, data[at : at + piece])
            if piece < 1000:
                await asyncio.sleep(0)
        await soon(lambda: len(ends.frames) == len(sizes))
        assert ends.frames == [frame_of(size) for size in sizes]


async def test_unsendable_frames_are_sent_later_in_order() -> None:
    """From two threads, more than any socket holds."""
    size = 50_000
    with Ends() as ends:

        def send(name: int) -> None:
            for i in range(40):
                ends.stream.send(bytes([name, i]) + frame_of(size))

        threads = [threading.Thread(target=send, args=(name,)) for name in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
            assert not thread.is_alive(), "whoever sends does not wait for who reads"
        frame = 4 + 2 + size
        data = await received(ends.other, 80 * frame)
        starts = range(0, 80 * frame, frame)
        heads = [tuple(data[at + 4 : at + 6]) for at in starts]
        assert all(data[at + 6 : at + frame] == frame_of(size) for at in starts)
        for name in (1, 2):
            assert [i for who, i in heads if who == name] == list(range(40))


async def test_later_frames_do_not_overtake_waiting_ones() -> None:
    """The socket has room again, while an earlier frame is partly sent."""
    with Ends() as ends:
        big = [bytes([i]) + frame_of(200_000) for i in range(10)]
        for frame in big:
            ends.stream.send(frame)
        begun = ends.other.recv(150_000)
        ends.stream.send(b"last")
        expected = b"".join(framed(frame) for frame in [*big, b"last"])
        assert await received(ends.other, len(expected), begun) == expected


async def test_a_peer_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process keeps its socket; frames for it are not kept for ever."""
    monkeypatch.setattr("paceline.rpc.streams.unix_stream.MAX_UNSENT_BYTES", 1_000_000)
    clock = ManualClock()
    with Ends(clock=clock) as ends:
        for _ in range(20):
            ends.stream.send(frame_of(200_000))
        await asyncio.sleep(0)
        assert not ends.stream.ended.done(), "it may not have had the time to take any"
        clock.advance(STUCK_SECONDS + 1)
        ends.stream.send(frame_of(1))
        with pytest.raises(UnavailableError, match="does not read"):
            await over(ends.stream)


async def test_cancelling_a_stream_twice_is_harmless() -> None:
    with Ends() as ends:
        ends.stream.cancel()
        ends.stream.cancel()
        assert ends.stream.cancelled()


async def test_frames_go_both_ways_at_once() -> None:
    a, b = socket.socketpair(socket.AF_UNIX)
    got: dict[str, list[bytes]] = {"a": [], "b": []}
    streams = [LocalStream(a, got["a"].append), LocalStream(b, got["b"].append)]
    for size in SIZES:
        for stream in streams:
            stream.send(frame_of(size))
    await soon(lambda: all(len(frames) == len(SIZES) for frames in got.values()))
    assert got["a"] == got["b"] == [frame_of(size) for size in SIZES]
    streams[0].close()
    await over(streams[1])
    assert not streams[1].cancelled()


async def test_a_too_long_frame_ends_the_stream() -> None:
    with Ends() as ends:
        ends.other.sendall((limits.MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"))
        with pytest.raises(InvalidArgumentError, match="frame"):
            await over(ends.stream)


async def test_a_receiver_may_end_the_stream_by_raising() -> None:
    taken = []

    def received(frame: bytes) -> None:
        taken.append(frame)
        raise ValueError("not that one")

    with Ends(received) as ends:
        ends.other.sendall(framed(b"one") + framed(b"two"))
        with pytest.raises(ValueError, match="not that one"):
            await over(ends.stream)
        assert taken == [b"one"]


async def test_nothing_is_sent_after_the_end() -> None:
    with Ends() as ends:
        ends.stream.cancel()
        assert ends.stream.cancelled()
        ends.stream.send(b"late")
        ends.stream.close(ValueError("late"))
        ends.stream.cancel()
        assert ends.stream.ended.result() is None
        assert ends.other.recv(10) == b""


async def test_waiting_for_the_end_may_be_cancelled() -> None:
    with Ends() as ends:

        async def wait() -> None:
            await ends.stream.ended

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        ends.stream.close()
        assert ends.other.recv(10) == b""


async def test_a_stream_ends_while_frames_wait_to_be_sent() -> None:
    with Ends() as ends:
        for _ in range(40):
            ends.stream.send(frame_of(50_000))
        await asyncio.sleep(0)
        ends.stream.close()
        ends.stream.send(b"late")
    with Ends() as ends:
        ends.other.close()
        for _ in range(40):
            ends.stream.send(frame_of(50_000))
        await over(ends.stream)


# ---- a server --------------------------------------------------------------------------------------


class Engine:
    """Notes what it is given; the test answers on another thread, as an engine does."""

    on_death = None
    seconds_since_progress = 0.0

    def __init__(self) -> None:
        self.submitted: list[tuple[Any, list[Any]]] = []
        self.left: list[Any] = []

    def submit(self, route: Callable[[Sequence[Any]], None], commands: Sequence[Any]) -> None:
        self.submitted.append((route, list(commands)))

    def leave(self, route: Callable[[Sequence[Any]], None]) -> None:
        self.left.append(route)

    def ask(self, question: Callable[[], None]) -> None:
        question()

    def answer(self, events: Sequence[Any], at: int = -1) -> None:
        thread = threading.Thread(target=self.submitted[at][0], args=(events,))
        thread.start()
        thread.join(SECONDS)


FRAME_CODEC = FrameCodec(target_pb2.VerifyRequest, frames.target_commands, frames.verify_response)
COMMAND = CloseSequence("one", 3)
EVENT = SequenceFailed("one", 3, 0, InvalidArgumentError("x", "y"))


@pytest.fixture
async def engine() -> Engine:
    return Engine()


@pytest.fixture
async def server(folder: Path, engine: Engine) -> AsyncIterator[LocalServer]:
    """One that listens; nothing is left of it."""
    server = LocalServer(str(folder / "w.sock"), WORKER, engine, FRAME_CODEC)
    server.start()
    yield server
    server.stop()
    assert names(folder) == []


async def test_commands_and_events_are_exchanged(server: LocalServer, engine: Engine) -> None:
    got: list[bytes] = []
    stream = await connected(server.path, got.append)
    await stream.write(frames.verify_request([COMMAND]))
    await soon(lambda: bool(engine.submitted))
    assert engine.submitted[0][1] == [COMMAND]
    engine.answer([EVENT])
    await soon(lambda: bool(got))
    (event,) = frames.target_events(target_pb2.VerifyResponse.FromString(got[0]))
    assert isinstance(event, SequenceFailed)
    assert event.sequence_id == "one"
    assert str(event.error) == str(EVENT.error)
    stream.close()
    await soon(lambda: engine.left == [engine.submitted[0][0]])


async def test_an_invalid_message_ends_only_its_stream(
    server: LocalServer, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = [await connected(server.path) for _ in range(2)]
    bad.send(b"\xff\xff\xff")
    await over(bad)
    await soon(lambda: len(engine.left) == 1)
    assert "Traceback" not in caplog.text
    assert "a coordinator's stream was ended" in caplog.text
    await good.write(frames.verify_request([COMMAND]))
    await soon(lambda: bool(engine.submitted))
    good.close()


async def test_an_unwritable_answer_does_not_reach_the_engine(server: LocalServer, engine: Engine) -> None:
    stream = await connected(server.path)
    await stream.write(frames.verify_request([COMMAND]))
    await soon(lambda: bool(engine.submitted))
    engine.submitted[0][0]([SequenceFailed("one", -1, 0, EVENT.error)])
    await over(stream)
    await soon(lambda: len(engine.left) == 1)


async def test_stopping_the_server_ends_its_streams(server: LocalServer) -> None:
    stream = await connected(server.path)
    server.stop()
    await over(stream)
    assert await connected(server.path) is None


async def test_only_this_user_may_open_the_socket(server: LocalServer) -> None:
    mode = os.stat(server.path).st_mode  # noqa: PTH116 - of a path as users give it
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made; none takes its time."""
    made, sleep = [], asyncio.sleep

    async def noted(seconds: float) -> None:
        made.append(seconds)
        await sleep(0)

    monkeypatch.setattr("paceline.rpc.streams.unix_stream.asyncio.sleep", noted)
    return made


async def test_a_failed_accept_does_not_end_the_server(
    server: LocalServer,
    paused: list[float],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = asyncio.get_running_loop()
    accept, failures = loop.sock_accept, [OSError(24, "Too many open files")]

    async def starved(listener: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return await accept(listener)

    monkeypatch.setattr(loop, "sock_accept", starved)
    first = await connected(server.path)
    second = await connected(server.path)
    assert second is not None
    assert PAUSE_SECONDS in paused
    assert "Too many open files" in caplog.text
    first.close()
    second.close()


async def test_an_unwatchable_connection_is_closed(
    server: LocalServer,
    engine: Engine,
    paused: list[float],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As where the kernel's bound on watches is met."""
    refused: list[socket.socket] = []

    class Unwatched(LocalStream):
        def __init__(self, connection: socket.socket, *others: Any) -> None:
            if not refused:
                refused.append(connection)
                raise OSError(errno.ENOSPC, "No space left on device")
            super().__init__(connection, *others)

    monkeypatch.setattr(unix_stream, "LocalStream", Unwatched)
    with socket.socket(socket.AF_UNIX) as first:
        first.setblocking(False)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(SECONDS):
            await loop.sock_connect(first, server.path)
            assert await loop.sock_recv(first, 1) == b""
    assert refused[0].fileno() == -1
    second = await connected(server.path)
    assert PAUSE_SECONDS in paused
    assert "No space left on device" in caplog.text
    second.close()


# ---- who is talked to ------------------------------------------------------------------------------


async def test_another_worker_is_not_connected_to(server: LocalServer, engine: Engine) -> None:
    assert await connected(server.path, worker="another") is None
    await soon(lambda: len(engine.left) == 1)


async def test_a_missing_or_invalid_socket_is_not_used(folder: Path) -> None:
    plain = folder / "plain"
    plain.write_text("text")
    for path in (folder / "none", plain, folder / ("long" * 50), f"{folder}/a\0b"):
        assert await connected(str(path)) is None


@pytest.mark.parametrize("what", ["socket.socket", "LocalStream"])
async def test_without_descriptors_the_socket_is_not_used(
    what: str, server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(f"paceline.rpc.streams.unix_stream.{what}", full)
    found = await connected(server.path)
    monkeypatch.undo()
    assert found is None


async def test_a_silent_peer_is_not_waited_for(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(folder / "s"))
        silent.listen()
        assert await connect(str(folder / "s"), WORKER, lambda _: None, 0.01) is None


# ---- the file --------------------------------------------------------------------------------------


async def test_a_leftover_socket_is_replaced(folder: Path, engine: Engine) -> None:
    path = str(folder / "w.sock")
    killed = socket.socket(socket.AF_UNIX)
    killed.bind(path)
    killed.close()
    server = LocalServer(path, WORKER, engine, FRAME_CODEC)
    server.start()
    stream = await connected(path)
    stream.close()
    server.stop()


async def test_paths_used_by_others_are_left_alone(server: LocalServer, engine: Engine, folder: Path) -> None:
    text = folder / "text"
    text.write_text("mine")
    for path in (server.path, str(text), str(folder / "none" / "w.sock"), str(folder / ("long" * 50))):
        with pytest.raises(UnavailableError, match="cannot listen on"):
            LocalServer(path, "second", engine, FRAME_CODEC).start()
    assert text.read_text() == "mine"
    text.unlink()
    stream = await connected(server.path)
    stream.close()
