"""Children of a fork server: real processes, no models. To a supervisor they are as executed ones are."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from harness.ending import ended, has_ended, watch_end
from harness.forking import ENVIRONMENT as SAME_IN_EVERY_TEST
from harness.log import Log
from harness.waiting import until

from paceline.supervisor import Backoff, ChildFailedError, ChildSpec, ForkServer, Supervisor
from paceline.supervisor import processes as processes_module
from paceline.supervisor.announcement import split_address
from paceline.supervisor.processes import CAN_FORK, Process

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="this system knows no pidfds")

ENVIRONMENT = {**os.environ, **SAME_IN_EVERY_TEST}
HANG = 30.0  # seconds after which a test has failed; nothing waits this long when all is well

PROGRAM = """
import json, os, socket, sys, threading
from paceline.supervisor.forking import await_arguments

server, *arguments = sys.argv[1:]
if server == "busy":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
if server == "broken":
    sys.exit(1)
if server == "stuck":
    threading.Event().wait()
if server in ("server", "busy"):
    arguments = await_arguments(socket.socket(fileno=int(arguments[0])))
    if arguments is None:
        sys.exit()
    server, *arguments = arguments

print("parent", os.getppid(), file=sys.stderr, flush=True)
if server == "exit":
    sys.exit(int(arguments[0]))
listener = socket.create_server(("127.0.0.1", int(arguments[-1])))
address = "127.0.0.1:%d" % listener.getsockname()[1]
print(json.dumps({"event": "ready", "role": "x", "address": address, "pid": os.getpid()}), flush=True)
print("descriptors", len(os.listdir("/proc/self/fd")), "group", os.getpgid(0), file=sys.stderr, flush=True)
sys.stdin.read()
print("orphaned", file=sys.stderr, flush=True)
"""


@pytest.fixture
def program(tmp_path: Path) -> tuple[str, ...]:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return sys.executable, "-P", str(path)


@pytest.fixture
def server(program: Sequence[str]) -> Iterator[ForkServer]:
    with serving(program) as running:
        yield running


@contextlib.contextmanager
def serving(program: Sequence[str], how: str = "server") -> Iterator[ForkServer]:
    with ForkServer(program, (how,), ENVIRONMENT) as server:
        server.wait_until_loaded(HANG)
        yield server


def spec(server: ForkServer, program: Sequence[str], role: str, *arguments: str) -> ChildSpec:
    command = (*program, *(arguments or ("serve",)))
    return ChildSpec(role=role, command=command, environment=ENVIRONMENT, start=server.start)


def parent_of(process: Process) -> int:
    assert process.stderr
    return int(process.stderr.readline().split()[1])


@contextlib.contextmanager
def started(server: ForkServer, command: Sequence[str], **more: str) -> Iterator[Process]:
    process = server.start([*command, "0"], {**ENVIRONMENT, **more})
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            assert stream
            stream.close()


def test_a_killed_child_comes_back_forked_and_on_the_same_port(
    server: ForkServer, program: tuple[str, ...]
) -> None:
    log = Log()
    with Supervisor(sink=log, backoff=Backoff(initial=0.01)) as supervisor:
        (before,) = supervisor.start([spec(server, program, "a")], HANG)
        supervisor.signal("a", signal.SIGKILL)
        after = supervisor.wait_until("a", lambda s: s.ready and s.starts == 2, HANG)
        assert (after.address, after.pid != before.pid) == (before.address, True)
        socket.create_connection(split_address(after.address), HANG).close()
        assert log.wait_for("[a] parent", 2, HANG) == [f"[a] parent {server.pid}"] * 2


def test_a_child_has_its_streams_its_group_and_nothing_of_its_siblings(
    server: ForkServer, program: tuple[str, ...]
) -> None:
    log = Log()
    with Supervisor(sink=log) as supervisor:
        children = supervisor.start([spec(server, program, role) for role in "abc"], HANG)
        for child in children:
            # Three streams, the listener, and the descriptor that counts them.
            (line,) = log.wait_for(f"[{child.role}] descriptors", timeout=HANG)
            assert line == f"[{child.role}] descriptors 5 group {child.pid}"
            assert Path(f"/proc/{child.pid}/comm").read_text() == "serve\n"


def test_a_child_whose_parent_is_gone_notices(server: ForkServer, program: tuple[str, ...]) -> None:
    """The pipe to one of them is in no other one, forked later."""
    with started(server, [*program, "serve"]) as first, started(server, [*program, "serve"]) as second:
        assert parent_of(first) == parent_of(second) == server.pid
        assert first.stdin
        first.stdin.close()
        assert first.wait() == 0
        assert not ended(second.pid, 0.0)


def test_how_a_child_ended_is_told(server: ForkServer, program: tuple[str, ...]) -> None:
    with started(server, [*program, "exit", "3"]) as process:
        assert process.wait() == 3
        process.send_signal(signal.SIGKILL)  # nobody's number any more
    with started(server, [*program, "serve"]) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM
    with pytest.raises(ChildFailedError) as failed, Supervisor(sink=Log()) as supervisor:
        supervisor.start([spec(server, program, "a", "exit", "4")], HANG)
    assert failed.value.exit_code == 4


def test_what_would_not_be_the_same_is_executed(
    server: ForkServer, program: tuple[str, ...], tmp_path: Path
) -> None:
    with started(server, [*program, "serve"], MORE="1") as process:
        assert parent_of(process) == os.getpid()
    other = tmp_path / "other.py"
    other.write_text(PROGRAM)
    with started(server, [*program[:-1], str(other), "serve"]) as process:
        assert parent_of(process) == os.getpid()


def test_a_child_that_works_elsewhere_is_executed(
    server: ForkServer, program: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = spec(server, program, "a")
    monkeypatch.chdir(tmp_path)
    log = Log()
    with started(server, [*program, "serve"]) as process:
        assert parent_of(process) == os.getpid()
        assert Path(f"/proc/{process.pid}/cwd").readlink() == tmp_path
    with Supervisor(sink=log) as supervisor:
        (child,) = supervisor.start([there], HANG)
        assert Path(f"/proc/{child.pid}/cwd").readlink() == Path(f"/proc/{server.pid}/cwd").readlink()
        assert log.wait_for("[a] parent") == [f"[a] parent {server.pid}"], "where the server works"


def test_a_fork_server_that_died_is_reaped_and_replaced(server: ForkServer, program: tuple[str, ...]) -> None:
    log = Log()
    with Supervisor(sink=log, backoff=Backoff(initial=0.01)) as supervisor:
        (before,) = supervisor.start([spec(server, program, "a")], HANG)
        died = server.pid
        os.kill(died, signal.SIGKILL)
        assert ended(died, HANG)
        until(lambda: not Path(f"/proc/{died}").exists(), "the end of the zombie", HANG)
        socket.create_connection(split_address(before.address), HANG).close()
        supervisor.signal("a", signal.SIGKILL)
        after = supervisor.wait_until("a", lambda s: s.ready and s.starts == 2, HANG)
        assert after.address == before.address
        assert server.pid != died
        until(server._is_there, "the successor", HANG)
        supervisor.signal("a", signal.SIGKILL)
        supervisor.wait_until("a", lambda s: s.ready and s.starts == 3, HANG)
        assert log.wait_for("[a] parent", 3, HANG)[2] == f"[a] parent {server.pid}"


def test_no_child_waits_for_a_successor(server: ForkServer, program: tuple[str, ...]) -> None:
    died = server.pid
    server._server_arguments = ("stuck",)
    os.kill(died, signal.SIGKILL)
    assert ended(died, HANG)
    for _ in range(2):
        with started(server, [*program, "serve"]) as process:
            assert parent_of(process) == os.getpid()
    assert server.pid != died
    assert not ended(server.pid, 0.0), "it may load for as long as it takes"


@pytest.mark.parametrize("how", ["busy", "broken"])
def test_a_server_that_cannot_be_forked_is_done_without(program: tuple[str, ...], how: str) -> None:
    with serving(program, how) as server, started(server, [*program, "serve"]) as process:
        assert parent_of(process) == os.getpid()


def test_a_server_that_does_not_answer_is_ended(
    server: ForkServer, program: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes_module, "_PATIENCE", 0.05)
    stopped = server.pid
    os.kill(stopped, signal.SIGSTOP)
    with started(server, [*program, "serve"]) as process:
        assert parent_of(process) == os.getpid()
    assert ended(stopped, HANG)


def test_the_server_ends_with_whoever_started_it(program: tuple[str, ...]) -> None:
    code = (
        "import os, sys; from paceline.supervisor import ForkServer; "
        "server = ForkServer(sys.argv[1:], ('server',), os.environ); "
        f"server.wait_until_loaded({HANG}); print(server.pid, flush=True); os._exit(0)"
    )
    command = [sys.executable, "-c", code, *program]
    started = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=True)
    assert ended(int(started.stdout), HANG)


FORKED = """
import os, signal, sys
from paceline.supervisor import ForkServer
server = ForkServer(sys.argv[1:], ("server",), os.environ)
server.wait_until_loaded(30)
child = server.start([*sys.argv[1:], "serve", "0"], os.environ)
sleeper = os.fork()
if sleeper == 0:
    signal.pause()
print(server.pid, child.pid, sleeper, flush=True)
signal.pause()
"""


def test_what_was_forked_of_us_keeps_neither_the_server_nor_its_children_alive(
    program: tuple[str, ...],
) -> None:
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-c", FORKED, *program]
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
        stack.callback(process.kill)
        assert process.stdout
        *ours, sleeper = (int(word) for word in process.stdout.readline().split())
        stack.callback(os.kill, sleeper, signal.SIGKILL)
        ends = [stack.enter_context(watch_end(pid)) for pid in (*ours, sleeper)]
        process.kill()
        assert all(has_ended(end, HANG) for end in ends[:-1])
        assert not has_ended(ends[-1], 0.0)


def test_closing_ends_the_server_alone(program: tuple[str, ...]) -> None:
    with serving(program) as server, started(server, [*program, "serve"]) as process:
        server.close()
        server.close()
        with pytest.raises(ProcessLookupError):
            os.kill(server.pid, 0)
        assert not ended(process.pid, 0.0)
