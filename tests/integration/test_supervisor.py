"""The supervisor with children that are small scripts: real processes, no models."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness.ending import has_ended, watch_end
from harness.log import Log

from paceline.core.errors import DeadlineExceededError, InvalidArgumentError
from paceline.supervisor.announcement import announced_addresses, split_address
from paceline.supervisor.children import ChildFailedError, ChildSpec, RestartBackoff, Supervisor
from paceline.supervisor.interrupting import sigterm_as_interrupt
from paceline.supervisor.processes import start_process

HANG = 30.0  # seconds after which a test has failed; nothing waits this long when all is well

CHILD = """
import argparse, json, os, signal, socket, sys
parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--say", default="")
parser.add_argument("--exit", type=int)
parser.add_argument("--deaf", action="store_true")
parser.add_argument("--slow", action="store_true")
parser.add_argument("--once", default="")
parser.add_argument("--socket", default="")
args = parser.parse_args()

def stop(number, frame):
    print("stopping", file=sys.stderr, flush=True)
    os._exit(0)

signal.signal(signal.SIGTERM, signal.SIG_IGN if args.deaf else stop)
if args.say:
    print(args.say, file=sys.stderr, flush=True)
if args.exit is not None:
    sys.exit(args.exit)
if args.once:
    with open(args.once, "a") as file:
        file.write("x")
    if 1 < os.path.getsize(args.once) < 4:
        print("error: not yet", file=sys.stderr, flush=True)
        sys.exit(1)
if args.socket:
    socket.socket(socket.AF_UNIX).bind(args.socket)
if not args.slow:
    listener = socket.create_server(("127.0.0.1", args.port))
    address = "127.0.0.1:%d" % listener.getsockname()[1]
    print("this line is not JSON", flush=True)
    print(json.dumps({"event": "other"}), flush=True)
    print(json.dumps({"event": "ready", "role": "x", "address": address, "pid": os.getpid()}), flush=True)
sys.stdin.read()
print("orphaned", file=sys.stderr, flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "child.py"
    path.write_text(CHILD)
    return path


def spec(script: Path, role: str, *options: str) -> ChildSpec:
    return ChildSpec(role=role, command=(sys.executable, "-S", str(script), *options))


def is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_children_start_together_and_report_addresses(script: Path) -> None:
    log = Log()
    with Supervisor(sink=log) as supervisor:
        first, second = supervisor.start([spec(script, "a"), spec(script, "b")], HANG)
        assert (first.role, second.role) == ("a", "b")
        for status in (first, second):
            socket.create_connection(split_address(status.address), HANG).close()
        pids = [status.pid for status in (first, second)]
    assert all(pid is not None and not is_alive(pid) for pid in pids)
    assert "[a] this line is not JSON" in log.lines
    assert "[a] orphaned" not in log.lines


def test_a_killed_child_restarts_on_the_same_port(script: Path) -> None:
    with Supervisor(sink=Log(), backoff=RestartBackoff(initial=0.01)) as supervisor:
        (before,) = supervisor.start([spec(script, "a")], HANG)
        for starts in (2, 3):
            supervisor.signal("a", signal.SIGKILL)
            after = supervisor.wait_until("a", lambda s, n=starts: s.ready and s.starts == n, HANG)
            assert after.address == before.address
            assert after.pid != before.pid
            socket.create_connection(split_address(after.address), HANG).close()


def test_a_child_that_fails_to_restart_is_retried(script: Path, tmp_path: Path) -> None:
    log = Log()
    with Supervisor(sink=log, backoff=RestartBackoff(initial=0.01)) as supervisor:
        supervisor.start([spec(script, "a", "--once", str(tmp_path / "count"))], HANG)
        supervisor.signal("a", signal.SIGKILL)
        supervisor.wait_until("a", lambda s: s.ready and s.starts == 4, HANG)
    assert log.lines.count("[a] error: not yet") == 2


@pytest.mark.parametrize(
    ("options", "message", "exit_code"),
    [
        (("--exit", "0"), "b: exited with code 0", 1),
        (("--say", "Killed by a bug", "--exit", "7"), "b: exited with code 7: Killed by a bug", 7),
        (("--say", "error: model: no such folder", "--exit", "2"), "b: model: no such folder", 2),
    ],
)
def test_a_failed_first_start_reports_message_and_code(
    script: Path, options: tuple[str, ...], message: str, exit_code: int
) -> None:
    with Supervisor(sink=Log()) as supervisor, pytest.raises(ChildFailedError) as failure:
        supervisor.start([spec(script, "a"), spec(script, "b", *options)], HANG)
    assert (failure.value.message, failure.value.exit_code) == (message, exit_code)


def test_a_program_that_does_not_exist_is_a_failed_start() -> None:
    missing = ChildSpec(role="a", command=("/nowhere/python",))
    with Supervisor(sink=Log()) as supervisor, pytest.raises(ChildFailedError, match="cannot be started"):
        supervisor.start([missing], HANG)


def test_a_port_in_use_is_a_failed_start(script: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, Supervisor(sink=Log()) as supervisor:
        child = ChildSpec(role="a", command=(sys.executable, "-S", str(script)), port=other.getsockname()[1])
        with pytest.raises(ChildFailedError, match="Address already in use"):
            supervisor.start([child], HANG)


def test_a_silent_child_is_killed_after_the_timeout(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another child may take its role at once."""
    processes, has_started, start = list[subprocess.Popen[str]](), threading.Event(), threading.Thread.start

    def noted(*args: Any) -> subprocess.Popen[str]:
        processes.append(start_process(*args))
        has_started.set()
        return processes[-1]

    def until_it_has_a_process(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith("keeper"):
            assert has_started.wait(HANG)

    with Supervisor(sink=Log()) as supervisor:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", until_it_has_a_process)
            patched.setattr("paceline.supervisor.children.start_process", noted)
            with pytest.raises(ChildFailedError, match=r"a: was not ready within 0\.01 seconds"):
                supervisor.start([spec(script, "a", "--slow")], 0.01)
        (silent,) = processes
        assert not is_alive(silent.pid)
        (status,) = supervisor.start([spec(script, "a")], HANG)
        assert supervisor.status("a") == status


def test_a_child_restarts_though_the_working_folder_changed(
    script: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths on its command line refer to the folder of the first start."""
    monkeypatch.chdir(script.parent)
    relative = spec(Path(script.name), "a")
    log = Log()
    with Supervisor(sink=log, backoff=RestartBackoff(initial=0.01)) as supervisor:
        supervisor.start([relative], HANG)
        monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
        supervisor.signal("a", signal.SIGKILL)
        supervisor.wait_until("a", lambda s: s.starts == 2, HANG)
        supervisor.wait_until("a", lambda s: s.ready or s.starts > 2, HANG)
    assert not log.find("No such file")


def test_a_child_whose_folder_is_gone_uses_the_current_one(script: Path, tmp_path: Path) -> None:
    with Supervisor(sink=Log()) as supervisor:
        supervisor.start([replace(spec(script, "a"), folder=str(tmp_path / "gone"))], HANG)


def test_a_removed_folder_is_made_again(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child puts a socket into it."""
    folder, uid = tmp_path / "sockets", os.getuid()
    owned = replace(spec(script, "a", "--socket", str(folder / "1.sock")), private=folder)
    with Supervisor(sink=Log(), backoff=RestartBackoff(initial=0.01)) as supervisor:
        (before,) = supervisor.start([owned], HANG)
        shutil.rmtree(folder)
        supervisor.signal("a", signal.SIGKILL)
        assert supervisor.wait_until("a", lambda s: s.ready and s.pid != before.pid, HANG)
        assert folder.stat().st_mode & 0o777 == 0o700
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
        with pytest.raises(ChildFailedError, match="belongs to another user"):
            supervisor.start([replace(owned, role="b")], HANG)


def test_later_children_stop_before_earlier_ones(script: Path) -> None:
    log = Log()
    with Supervisor(sink=log) as supervisor:
        supervisor.start([spec(script, "worker")], HANG)
        supervisor.start([spec(script, "coordinator")], HANG)
    assert [line for line in log.lines if "stopping" in line] == [
        "[coordinator] stopping",
        "[worker] stopping",
    ]


@pytest.mark.parametrize("options", [("--deaf",), ()])
def test_a_child_that_does_not_stop_is_killed(script: Path, options: tuple[str, ...]) -> None:
    with Supervisor(sink=Log(), stop_timeout=0.05) as supervisor:
        (status,) = supervisor.start([spec(script, "a", *options)], HANG)
        if not options:
            supervisor.signal("a", signal.SIGSTOP)
    assert not is_alive(status.pid)


def test_a_stopped_child_is_not_restarted(script: Path) -> None:
    with Supervisor(sink=Log(), backoff=RestartBackoff(initial=HANG, maximum=HANG)) as supervisor:
        supervisor.start([spec(script, "a")], HANG)
        supervisor.signal("a", signal.SIGKILL)
        supervisor.wait_until("a", lambda s: s.pid is None, HANG)  # backing off
        with pytest.raises(InvalidArgumentError, match="no process"):
            supervisor.signal("a", signal.SIGKILL)
    assert supervisor.status("a").starts == 1


def test_waiting_for_a_child_ends_with_a_clear_error(script: Path) -> None:
    with Supervisor(sink=Log()) as supervisor:
        supervisor.start([spec(script, "a")], HANG)
        with pytest.raises(DeadlineExceededError, match="condition not met"):
            supervisor.wait_until("a", lambda s: s.starts > 1, 0.01)
        with pytest.raises(InvalidArgumentError, match="no such child: b"):
            supervisor.status("b")


SUPERVISING = """
import sys
from paceline.supervisor import ChildSpec, Supervisor, sigterm_as_interrupt
try:
    with sigterm_as_interrupt(), Supervisor() as supervisor:
        for role in ("worker", "coordinator"):
            spec = ChildSpec(role=role, command=(sys.executable, "-S", sys.argv[1]))
            (status,) = supervisor.start([spec], 30)
            print(status.pid, flush=True)
        supervisor.wait()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_orphan_remains_when_the_supervisor_ends(script: Path, number: signal.Signals) -> None:
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", SUPERVISING, str(script)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
        assert process.stdout
        pids = [int(process.stdout.readline()) for _ in range(2)]
        ends = [stack.enter_context(watch_end(pid)) for pid in pids]
        process.send_signal(number)
        out, _ = process.communicate(timeout=HANG)
        assert all(has_ended(end, HANG) for end in ends)
    assert process.returncode == (-signal.SIGKILL if number is signal.SIGKILL else 0)
    assert out == (b"" if number is signal.SIGKILL else b"interrupted\n")


FORKED = """
import os, signal, sys
from paceline.supervisor import ChildSpec, Supervisor
supervisor = Supervisor()
(status,) = supervisor.start([ChildSpec(role="worker", command=(sys.executable, "-S", sys.argv[1]))], 30)
sleeper = os.fork()
if sleeper == 0:
    signal.pause()
print(status.pid, sleeper, flush=True)
signal.pause()
"""


def test_a_forked_process_keeps_no_child_alive(script: Path) -> None:
    """A fork, as of a `multiprocessing` pool, inherits the ends of the children's pipes."""
    command = [sys.executable, "-c", FORKED, str(script)]
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
        stack.callback(process.kill)
        assert process.stdout
        child, sleeper = (int(word) for word in process.stdout.readline().split())
        stack.callback(os.kill, sleeper, signal.SIGKILL)
        child_end, sleeper_end = (stack.enter_context(watch_end(pid)) for pid in (child, sleeper))
        process.kill()
        assert has_ended(child_end, HANG)
        assert not has_ended(sleeper_end, 0.0)


def test_backoff_grows_to_its_bound_and_resets() -> None:
    backoff = RestartBackoff(initial=0.1, factor=2, maximum=1, healthy_after=30)
    assert [backoff.delay(n) for n in (1, 2, 3, 4, 5, 10_000)] == [0.1, 0.2, 0.4, 0.8, 1, 1]
    assert backoff.count(4, ready_seconds=29) == 5
    assert backoff.count(4, ready_seconds=30) == 1


HERE = "127.0.0.1:4312"


@pytest.mark.parametrize(
    ("line", "addresses"),
    [
        ('{"event": "ready", "role": "draft", "address": "127.0.0.1:4312", "pid": 1}', (HERE, "", "")),
        (
            '{"event": "ready", "address": "127.0.0.1:4312", "http_address": "[::1]:80"}',
            (HERE, "[::1]:80", ""),
        ),
        ('{"event": "ready", "address": "127.0.0.1:4312", "metrics_address": "a:9"}', (HERE, "", "a:9")),
        ('{"event": "ready", "address": "[::1]:4312"}', ("[::1]:4312", "", "")),
        ('{"event": "ready", "address": "127.0.0.1:0"}', None),
        ('{"event": "ready", "address": 4312}', None),
        ('{"event": "ready", "address": "127.0.0.1:4312", "http_address": "127.0.0.1:0"}', None),
        ('{"event": "ready", "address": "127.0.0.1:4312", "http_address": 80}', None),
        ('{"event": "ready", "address": "127.0.0.1:4312", "metrics_address": "9"}', None),
        ('{"event": "ready"}', None),
        ('{"event": "started", "address": "127.0.0.1:4312"}', None),
        ('["event"]', None),
        ("3", None),
        ("null", None),
        ("ready", None),
        ("", None),
    ],
)
def test_only_a_ready_line_announces_addresses(line: str, addresses: tuple[str, str, str] | None) -> None:
    assert announced_addresses(line) == addresses


def test_a_sigterm_within_asyncio_cancels_the_main_task() -> None:
    cancelled = []

    async def wait() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGTERM)
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with sigterm_as_interrupt(), pytest.raises(KeyboardInterrupt):
        asyncio.run(wait())
    assert cancelled


def test_only_the_first_sigterm_interrupts() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with sigterm_as_interrupt():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before
