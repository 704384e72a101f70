"""A fork server whose words do not arrive whole: what was asked for is executed, and nothing waits for it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.supervisor import ForkServer
from paceline.supervisor import processes as processes_module
from paceline.supervisor.processes import CAN_FORK, Process

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="this system knows no pidfds")

ENVIRONMENT = {**os.environ, "PYTEST_CURRENT_TEST": ""}
DESCRIPTORS = Path("/proc/self/fd")
HANG = 30.0  # seconds after which a test has failed; nothing waits this long when all is well
PROGRAM = """
import os, socket, sys
from paceline.supervisor.forking import await_arguments

if sys.argv[1] == "server" and await_arguments(socket.socket(fileno=int(sys.argv[2]))) is None:
    sys.exit()
if sys.argv[1] == "mad":
    socket.socket(fileno=int(sys.argv[2])).send(b"{")
print(os.getppid(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def program(tmp_path: Path) -> tuple[str, ...]:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return sys.executable, "-P", str(path)


@pytest.fixture
def server(program: tuple[str, ...]) -> Iterator[ForkServer]:
    with ForkServer(program, ("server",), ENVIRONMENT) as server:
        server.wait_until_loaded(HANG)
        yield server


@contextlib.contextmanager
def started(server: ForkServer, program: tuple[str, ...]) -> Iterator[Process]:
    process = server.start([*program, "serve"], ENVIRONMENT)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            assert stream
            stream.close()


def parent_of(process: Process) -> int:
    assert process.stdout
    return int(process.stdout.readline())


def test_a_child_without_its_descriptor_is_ended_and_another_executed(
    server: ForkServer, program: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    receive, withheld, at_the_limit = socket.recv_fds, list[int](), threading.Event()

    def received(*args: Any) -> Any:
        packet, descriptors, *more = receive(*args)
        if at_the_limit.is_set():
            withheld.extend(descriptors)
            descriptors = []
        return packet, descriptors, *more

    monkeypatch.setattr(processes_module.socket, "recv_fds", received)
    with started(server, program) as process:  # the reader is in a call of the function that was there before
        assert parent_of(process) == server.pid
    at_the_limit.set()
    with started(server, program) as process:
        at_the_limit.clear()
        assert parent_of(process) == os.getpid()
    (ending,) = withheld
    assert select.select([ending], [], [], HANG)[0], "the forked child has ended"
    os.close(ending)
    with started(server, program), started(server, program) as process:
        assert parent_of(process) == server.pid


def test_a_server_that_cannot_be_understood_is_done_without(
    program: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with ForkServer(program, ("mad",), ENVIRONMENT) as server:
        server.wait_until_loaded(HANG)
        for _ in range(2):
            with started(server, program) as process:
                assert parent_of(process) == os.getpid()
    assert "the fork server cannot be understood" in caplog.text


def test_pipes_are_closed_where_there_is_no_room_for_all(
    server: ForkServer, program: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, room = os.pipe, [None] * 2

    def few() -> tuple[int, int]:
        if not room:
            raise OSError(24, "Too many open files")
        room.pop()
        return pipe()

    open_before = len(list(DESCRIPTORS.iterdir()))
    monkeypatch.setattr(processes_module.os, "pipe", few)
    with pytest.raises(OSError, match="Too many open files"):
        server.start([*program, "serve"], ENVIRONMENT)
    monkeypatch.undo()
    assert len(list(DESCRIPTORS.iterdir())) == open_before
    with started(server, program) as process:
        assert parent_of(process) == server.pid
