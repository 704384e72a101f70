"""A child is restarted however it ended. No processes are started."""

from __future__ import annotations

import io
import queue
import signal
import threading
from collections.abc import Callable, Sequence

import pytest

from paceline.core.errors import InvalidArgumentError, PacelineError, UnavailableError
from paceline.supervisor import ChildFailedError, ChildSpec, ChildStatus, RestartBackoff, Supervisor, children

pytestmark = pytest.mark.slow


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
        self.started = threading.Event()

    def __call__(self, command: Sequence[str]) -> Child:
        self.commands.append([*command])
        self.children.append(Child(len(self.children), self.says))
        self.started.set()
        return self.children[-1]


class Specs:
    """What to run: instead of a process, a program of Python's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._programs: dict[str, Callable[[Sequence[str]], Child]] = {}
        monkeypatch.setattr(children, "start_process", self._start)

    def __call__(self, role: str, program: Callable[[Sequence[str]], Child], *options: str) -> ChildSpec:
        self._programs[role] = program
        return ChildSpec(role=role, command=(role, *options))

    def _start(self, command: Sequence[str], *_: object) -> Child:
        return self._programs[command[0]](command)


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> Specs:
    return Specs(monkeypatch)


def supervising() -> Supervisor:
    return Supervisor(sink=lambda line: None, backoff=RestartBackoff(initial=0.0))


def test_a_child_ended_by_an_unnamed_signal_restarts(specs: Specs) -> None:
    program = Program()
    with supervising() as supervisor:
        supervisor.start([specs("a", program)], HANG)
        program.children[0].end(-40)
        assert supervisor.wait_until("a", lambda s: s.ready and s.starts == 2, HANG).pid == 1


def test_a_child_restarts_on_all_its_ports(specs: Specs) -> None:
    """Also on those it had chosen by itself."""
    program = Program(WITH_PORTS)
    with supervising() as supervisor:
        supervisor.start([specs("a", program, "--metrics-port", "0")], HANG)
        program.children[0].end(1)
        supervisor.wait_until("a", lambda s: s.ready and s.starts == 2, HANG)
    first, second = program.commands
    assert first == ["a", "--metrics-port", "0", "--port", "0"]
    assert second[3:] == ["--port", "5000", "--http-port", "5001", "--metrics-port", "5002"]


def test_a_child_that_cannot_be_waited_for_restarts(specs: Specs, caplog: pytest.LogCaptureFixture) -> None:
    program = Program()
    with supervising() as supervisor:
        supervisor.start([specs("a", program)], HANG)
        program.children[0].end(RuntimeError("no such thing"))
        assert supervisor.wait_until("a", lambda s: s.ready and s.starts == 2, HANG).pid == 1
        assert program.children[0].signals == [signal.SIGKILL]
    assert "no such thing" in caplog.text


def test_an_unreadable_child_is_reported_at_once(specs: Specs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start does not wait for the thread that failed."""
    program, start = Program(), threading.Thread.start

    def keepers_alone(thread: threading.Thread) -> None:
        if thread.name.startswith("keeper"):
            start(thread)
        else:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", keepers_alone)
    with supervising() as supervisor, pytest.raises(ChildFailedError, match="can't start new thread"):
        supervisor.start([specs("a", program)], HANG)
    assert program.children[0].signals == [signal.SIGKILL]


def raised_by(call: Callable[[], object], before: Callable[[], object]) -> PacelineError:
    """By a call in another thread, once `before` has returned here."""
    raised: list[PacelineError] = []

    def caller() -> None:
        try:
            call()
        except PacelineError as error:
            raised.append(error)

    thread = threading.Thread(target=caller, daemon=True)
    thread.start()
    before()
    thread.join(HANG)
    assert raised, "it waits"
    return raised[0]


def test_stopping_the_supervisor_ends_a_start(specs: Specs) -> None:
    silent = Program(says="")
    with supervising() as supervisor:

        def stop() -> None:
            assert silent.started.wait(HANG)
            supervisor.stop()

        spec = specs("a", silent)
        error = raised_by(lambda: supervisor.start([spec], 10 * HANG), stop)
        assert isinstance(error, ChildFailedError)
        assert error.message == "a: was stopped before all were ready"
        with pytest.raises(ChildFailedError, match="b: was stopped"):
            supervisor.start([specs("b", silent)], 10 * HANG)
    assert len(silent.children) == 1


def test_waiting_for_a_stopped_child_is_an_error(specs: Specs) -> None:
    """Also where its next start is far away."""
    program, waits = Program(), threading.Event()
    backoff = RestartBackoff(initial=10 * HANG, maximum=10 * HANG)
    with Supervisor(sink=lambda line: None, backoff=backoff) as supervisor:
        supervisor.start([specs("a", program)], HANG)
        program.children[0].end(1)
        supervisor.wait_until("a", lambda s: s.pid is None, HANG)

        def second(status: ChildStatus) -> bool:
            waits.set()
            return status.starts == 2

        def stop() -> None:
            assert waits.wait(HANG)
            supervisor.stop()

        error = raised_by(lambda: supervisor.wait_until("a", second, 10 * HANG), stop)
        assert isinstance(error, UnavailableError)
        assert supervisor.wait_until("a", lambda s: s.starts == 1, HANG).pid is None, "as wanted"


def test_a_failed_start_leaves_nothing(specs: Specs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a process nor a status."""
    silent, start = Program(says=""), threading.Thread.start

    def until_it_has_a_process(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith("keeper"):
            assert silent.started.wait(HANG)

    with supervising() as supervisor:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", until_it_has_a_process)
            with pytest.raises(ChildFailedError, match="was not ready within"):
                supervisor.start([specs("a", silent)], 0.01)
        assert silent.children[0].signals[0] == signal.SIGTERM
        assert len(silent.children) == 1, "it has no successor"
        with pytest.raises(InvalidArgumentError, match="no such child"):
            supervisor.status("a")
        (second,) = supervisor.start([specs("a", Program())], HANG)
        assert supervisor.status("a") == second


def test_ready_children_end_with_the_failed_one(specs: Specs) -> None:
    program = Program()

    def missing(*_: object) -> Child:
        raise FileNotFoundError(2, "No such file")

    with supervising() as supervisor:
        supervisor.start([specs("a", program)], HANG)
        with pytest.raises(ChildFailedError, match="d: cannot be started: No such file"):
            supervisor.start([specs("b", program), specs("c", program), specs("d", missing)], HANG)
        assert all(child.signals for child in program.children[1:])
        assert supervisor.status("a").ready
        assert not program.children[0].signals
