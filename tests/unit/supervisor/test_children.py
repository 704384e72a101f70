"""Whatever ends a child, or keeps it from being looked after, it has a successor. No processes."""

from __future__ import annotations

import io
import queue
import signal
import threading
from collections.abc import Mapping, Sequence

import pytest

from paceline.supervisor import Backoff, ChildFailedError, ChildSpec, Supervisor

HANG = 30.0  # seconds after which a test has failed; nothing waits this long when all is well
READY = '{"event": "ready", "address": "127.0.0.1:5000"}\n'
WITH_PORTS = READY.replace("}", ', "http_address": "127.0.0.1:5001", "metrics_address": "127.0.0.1:5002"}')


class Child:
    """A process that is ready at once and ends when it is told how; any signal ends it too."""

    def __init__(self, pid: int, says: str) -> None:
        self.pid = pid
        self.stdin, self.stdout, self.stderr = io.StringIO(), io.StringIO(says), io.StringIO()
        self.signals: list[int] = []
        self._end: queue.SimpleQueue[int | Exception] = queue.SimpleQueue()

    def wait(self) -> int:
        how = self._end.get(timeout=HANG)
        if isinstance(how, Exception):
            raise how
        return how

    def end(self, how: int | Exception) -> None:
        self._end.put(how)

    def send_signal(self, sig: int) -> None:
        self.signals.append(sig)
        self._end.put(-sig)


class Program:
    """Starts children, whose pids count them."""

    def __init__(self, says: str = READY) -> None:
        self.says = says
        self.children: list[Child] = []
        self.commands: list[list[str]] = []

    def __call__(self, command: Sequence[str], environment: Mapping[str, str] | None) -> Child:
        self.commands.append([*command])
        self.children.append(Child(len(self.children), self.says))
        return self.children[-1]


def supervising() -> Supervisor:
    return Supervisor(sink=lambda line: None, backoff=Backoff(initial=0.0))


def test_a_child_ended_by_a_signal_without_a_name_is_started_again() -> None:
    program = Program()
    with supervising() as supervisor:
        supervisor.start([ChildSpec(role="a", command=("a",), start=program)], HANG)
        program.children[0].end(-40)
        assert supervisor.wait_until("a", lambda s: s.ready and s.starts == 2, HANG).pid == 1


def test_a_child_is_started_again_on_every_port_that_it_had() -> None:
    """Once on another one for metrics, where it had chosen that by itself."""
    program = Program(WITH_PORTS)
    with supervising() as supervisor:
        supervisor.start([ChildSpec(role="a", command=("a", "--metrics-port", "0"), start=program)], HANG)
        program.children[0].end(1)
        supervisor.wait_until("a", lambda s: s.ready and s.starts == 2, HANG)
    first, second = program.commands
    assert first == ["a", "--metrics-port", "0", "--port", "0"]
    assert second[3:] == ["--port", "5000", "--http-port", "5001", "--metrics-port", "5002"]


def test_a_child_that_could_not_be_waited_for_is_ended_and_started_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    program = Program()
    with supervising() as supervisor:
        supervisor.start([ChildSpec(role="a", command=("a",), start=program)], HANG)
        program.children[0].end(RuntimeError("no such thing"))
        assert supervisor.wait_until("a", lambda s: s.ready and s.starts == 2, HANG).pid == 1
        assert program.children[0].signals == [signal.SIGKILL]
    assert "no such thing" in caplog.text


def test_a_child_that_cannot_be_read_from_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start does not wait for the keeper that failed."""
    program, start = Program(), threading.Thread.start

    def keepers_alone(thread: threading.Thread) -> None:
        if thread.name.startswith("keeper"):
            start(thread)
        else:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", keepers_alone)
    with supervising() as supervisor, pytest.raises(ChildFailedError, match="can't start new thread"):
        supervisor.start([ChildSpec(role="a", command=("a",), start=program)], HANG)
    assert program.children[0].signals == [signal.SIGKILL]
