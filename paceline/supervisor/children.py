"""Supervision of child processes: start, watch, restart and stop, without leaving orphans.

A child announces itself with one JSON line on standard output,
`{"event": "ready", "role": …, "address": "127.0.0.1:43121", "pid": …}`, with `http_address` and
`metrics_address` if it has such ports; all other output is log lines.

starting ──ready──▶ ready ──exit──▶ waiting ──backoff──▶ starting      (a restart keeps the reported ports)
    └──exit before its first announcement──▶ failed, which fails the whole start

A child's standard input is a pipe held only by the supervisor. However the supervisor ends, the pipe closes,
and a child started with `--exit-with-parent` ends. Each child has its own process group, so that Ctrl-C in a
terminal reaches only the supervisor, which then stops the children in order.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from paceline.core.clock import Clock, monotonic
from paceline.core.errors import DeadlineExceededError, InvalidArgumentError, PacelineError, UnavailableError
from paceline.supervisor.announcement import (
    Announced,
    announced_addresses,
    last_words,
    shell_code,
    split_address,
)
from paceline.supervisor.folders import make_private, working_folder
from paceline.supervisor.processes import start_process
from paceline.telemetry.steps import step_in

logger = logging.getLogger(__name__)

STOP_TIMEOUT = 15.0  # seconds; enough for a process that drains for 10
STOP_MARGIN = 5.0  # seconds that a process may take after its drain
_TAIL_LINES = 20
_LAST_LINES_TIMEOUT = 2.0  # seconds to read the last output of an ended child
_NICE_STOP = (signal.SIGTERM, signal.SIGCONT)  # SIGCONT lets a suspended process handle the SIGTERM

Sink = Callable[[str], None]
"""Receives one log line of a child, without its line end."""


class ChildFailedError(PacelineError):
    """A child ended before it was ready, or was not ready in time. `exit_code` is non-zero.

    The message begins with the child's role, or with the `option` that the child's error is about.
    """

    def __init__(self, role: str, message: str, exit_code: int, *, option: str = "") -> None:
        super().__init__(f"{option or role}: {message}")
        self.role = role
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """The command of a child. `--port N` is appended: `port` at first, the announced port after a restart.

    A restart also appends `--http-port N` and `--metrics-port N` if such ports were announced.
    """

    role: str
    command: tuple[str, ...]
    port: int = 0
    environment: Mapping[str, str] | None = None
    """None inherits this process's environment."""
    folder: str | None = field(default_factory=working_folder)
    """Working folder, also after restarts; the default is the current one."""
    private: Path | None = None
    """A private folder that is created before each start, because clean-up tools may have removed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartBackoff:
    """Delay before a restart, in seconds: grows with consecutive failures up to `maximum`."""

    initial: float = 0.1
    factor: float = 2.0
    maximum: float = 10.0
    healthy_after: float = 30.0
    """Seconds of readiness that reset the number of failures."""

    def delay(self, failures: int) -> float:
        """Seconds to wait after this many consecutive failures."""
        return min(self.maximum, self.initial * self.factor ** min(failures - 1, 64))

    def count(self, failures: int, ready_seconds: float) -> int:
        """Consecutive failures, including a child that ended after `ready_seconds` of readiness."""
        return 1 if ready_seconds >= self.healthy_after else failures + 1


@dataclass(frozen=True, slots=True)
class ChildStatus:
    """Snapshot of a child. `starts` counts its processes so far."""

    role: str
    pid: int | None
    address: str
    ready: bool
    starts: int
    http_address: str = ""
    """Its HTTP address; empty without one."""


def log_to_stderr(line: str) -> None:
    """A sink that forwards children's logs to standard error."""
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed before the children end
        # One write per line, because several threads write, and `print` writes the line end separately.
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def discard(line: str) -> None:
    """A sink that drops children's logs; error messages still quote their last lines."""


def steps_to(tell: Callable[[str], object]) -> Sink:
    """A sink that passes the steps of children's starts to `tell` and drops their other log lines."""

    def sink(line: str) -> None:
        told = step_in(line)
        if told is not None:
            tell(told)

    return sink


class _Child(threading.Thread):
    """One child and its restarts; the thread starts the process, waits for its end, backs off and repeats."""

    def __init__(
        self,
        spec: ChildSpec,
        *,
        changed: threading.Condition,
        backoff: RestartBackoff,
        sink: Sink,
        clock: Clock,
    ) -> None:
        super().__init__(name=f"keeper of {spec.role}", daemon=True)
        self.spec = spec
        self._changed = changed
        self.stopping = threading.Event()
        """Set when the child must end and not be restarted."""
        self._backoff = backoff
        self._sink = sink
        self._clock = clock
        # Guarded by `changed`:
        self._process: subprocess.Popen[str] | None = None
        self._port = spec.port
        self._announced = Announced()
        self._ready_since: float | None = None
        self._starts = 0
        self.failure: ChildFailedError | None = None

    @property
    def status(self) -> ChildStatus:
        """Snapshot; the caller must hold `changed`."""
        pid = self._process.pid if self._process else None
        ready = self._ready_since is not None
        known = self._announced
        return ChildStatus(self.spec.role, pid, known.address, ready, self._starts, known.http)

    def signal(self, *numbers: signal.Signals) -> None:
        """Signal the current process, if any."""
        with self._changed:
            for number in numbers:
                if self._process:
                    self._process.send_signal(number)

    def await_end(self, timeout: float | None) -> None:
        """Wait for the last process. A thread whose start was interrupted will see the stop by itself."""
        if self.is_alive():
            self.join(timeout)

    def run(self) -> None:
        failures = 0
        while True:
            try:
                exit_code, last_words, ready_seconds = self._run_once()
            except OSError as error:  # no such program, or too many processes
                self._abandon()
                exit_code, last_words, ready_seconds = 1, f"cannot be started: {error.strerror}", 0.0
            except Exception as error:  # if this thread ended, the child would never be restarted
                logger.exception("%s cannot be supervised", self.spec.role)
                self._abandon()
                exit_code, last_words, ready_seconds = 1, f"cannot be supervised: {error!r}", 0.0
            with self._changed:
                if self.stopping.is_set():
                    return
                if not self._announced.address:
                    self.failure = ChildFailedError(self.spec.role, last_words, exit_code)
                    self._changed.notify_all()
                    return
            failures = self._backoff.count(failures, ready_seconds)
            delay = self._backoff.delay(failures)
            logger.warning("%s %s; restarting in %.1f s", self.spec.role, last_words, delay)
            if self.stopping.wait(delay):
                return

    def _run_once(self) -> tuple[int, str, float]:
        """Run one process to its end. Returns its exit code, last words and seconds of readiness."""
        with self._changed:  # held while starting, so that a stop sees either no process or this one
            if self.stopping.is_set():
                return 0, "", 0.0
            spec = self.spec
            if spec.private is not None:
                make_private(spec.private)
            process = start_process([*spec.command, *self._ports()], spec.environment, spec.folder)
            self._process = process
            self._starts += 1
        tail: deque[str] = deque(maxlen=_TAIL_LINES)
        readers = [
            threading.Thread(target=self._read_output, args=(process,), daemon=True),
            threading.Thread(target=self._read_log, args=(process.stderr, tail), daemon=True),
        ]
        for reader in readers:
            reader.start()
        exit_code = process.wait()
        for reader in readers:
            reader.join(_LAST_LINES_TIMEOUT)  # a grandchild may hold the pipes open
        assert process.stdin
        process.stdin.close()
        with self._changed:
            since, self._ready_since, self._process = self._ready_since, None, None
            self._changed.notify_all()
        ready_seconds = 0.0 if since is None else self._clock() - since
        return shell_code(exit_code), last_words(exit_code, tail), ready_seconds

    def _abandon(self) -> None:
        """Kill a process that could not be supervised, if any: the next process needs its ports."""
        with self._changed:
            process, self._process, self._ready_since = self._process, None, None
            self._changed.notify_all()
        if process is not None:
            with contextlib.suppress(Exception):  # the failed operation may fail again
                process.send_signal(signal.SIGKILL)
                process.wait()

    def _ports(self) -> list[str]:
        """Port options; a restart keeps every announced port."""
        known, ports = self._announced, ["--port", str(self._port)]
        for option, address in (("--http-port", known.http), ("--metrics-port", known.metrics)):
            if address:
                ports += [option, str(split_address(address)[1])]
        return ports

    def _read_output(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        with process.stdout:
            for line in process.stdout:
                announced = announced_addresses(line)
                if announced is None:
                    self._sink(f"[{self.spec.role}] {line.rstrip()}")
                    continue
                with self._changed:
                    if self._process is process:
                        self._announced = announced
                        self._port = split_address(announced.address)[1]
                        self._ready_since = self._clock()
                        self._changed.notify_all()

    def _read_log(self, stream: IO[str], tail: deque[str]) -> None:
        with stream:
            for line in stream:
                if line.strip():  # progress bars write empty lines
                    tail.append(line.rstrip())
                    self._sink(f"[{self.spec.role}] {line.rstrip()}")


class Supervisor:
    """Keeps children running during the `with` block.

    `start` may be called several times; children of later calls are stopped first. All methods are
    thread-safe.
    """

    def __init__(
        self,
        *,
        sink: Sink = log_to_stderr,
        backoff: RestartBackoff | None = None,
        stop_timeout: float = STOP_TIMEOUT,
        clock: Clock = monotonic,
    ) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._stopping = threading.Event()
        self._groups: list[list[_Child]] = []
        self._sink = sink
        self._backoff = backoff or RestartBackoff()
        self._stop_timeout = stop_timeout
        self._clock = clock

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, specs: Sequence[ChildSpec], timeout: float) -> list[ChildStatus]:
        """Start all children together and wait until they are ready. Raises ChildFailedError, also after
        `stop`. After any error, all of them are stopped.
        """
        group = [
            _Child(
                spec,
                changed=self._changed,
                backoff=self._backoff,
                sink=self._sink,
                clock=self._clock,
            )
            for spec in specs
        ]
        self._groups.append(group)
        try:
            if self._stopping.is_set():  # `stop` has not seen this group; a later `stop` will
                for child in group:
                    child.stopping.set()
            for child in group:
                child.start()
            return self._when_ready(group, timeout)
        except BaseException:
            self._end([group])
            self._groups.remove(group)
            raise

    def _when_ready(self, group: Sequence[_Child], timeout: float) -> list[ChildStatus]:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    any(c.failure or c.stopping.is_set() for c in group) or all(c.status.ready for c in group)
                ),
                timeout,
            )
            for child in group:
                if child.failure:
                    raise child.failure
            for child in group:
                if child.stopping.is_set():
                    raise ChildFailedError(child.spec.role, "was stopped before all were ready", 1)
                if not child.status.ready:
                    raise ChildFailedError(child.spec.role, f"was not ready within {timeout:g} seconds", 1)
            return [child.status for child in group]

    def status(self, role: str) -> ChildStatus:
        """Snapshot of the child with this role. Raises InvalidArgumentError for an unknown role."""
        with self._changed:
            return self._child(role).status

    def signal(self, role: str, number: signal.Signals) -> int:
        """Signal a child's current process and return its pid. Raises InvalidArgumentError if it has none."""
        with self._changed:
            child = self._child(role)
            pid = child.status.pid
            if pid is None:
                raise InvalidArgumentError("role", f"{role} has no process at the moment")
            child.signal(number)
            return pid

    def wait_until(self, role: str, condition: Callable[[ChildStatus], bool], timeout: float) -> ChildStatus:
        """Wait until a child satisfies `condition`.

        Raises DeadlineExceededError, or UnavailableError if the child is stopped before that.
        """
        with self._changed:
            child = self._child(role)
            self._changed.wait_for(lambda: condition(child.status) or child.stopping.is_set(), timeout)
            status = child.status
            if condition(status):
                return status
            if child.stopping.is_set():
                raise UnavailableError(f"the child was stopped while waiting for a condition: {status}")
            raise DeadlineExceededError(f"condition not met after {timeout:g} seconds: {status}")

    def wait(self) -> None:
        """Block until `stop`, or until a signal raises in the main thread."""
        self._stopping.wait()

    def stop(self) -> None:
        """Ask every child to end, wait, then kill the remaining ones. Idempotent.

        A KeyboardInterrupt (second Ctrl-C) ends the waiting, but children are still killed.
        """
        self._stopping.set()
        self._end([*self._groups])

    def _end(self, groups: Sequence[Sequence[_Child]]) -> None:
        """Stop the groups, later ones first."""
        children = [child for group in groups for child in group]
        for child in children:
            child.stopping.set()
        try:
            with self._changed:
                self._changed.notify_all()
            for group in reversed(groups):
                for child in group:
                    child.signal(*_NICE_STOP)
                deadline = self._clock() + self._stop_timeout
                for child in group:
                    child.await_end(max(0.0, deadline - self._clock()))
        finally:
            for child in children:
                child.signal(signal.SIGKILL)
            for child in children:
                child.await_end(None)

    def _child(self, role: str) -> _Child:
        for group in self._groups:
            for child in group:
                if child.spec.role == role:
                    return child
        raise InvalidArgumentError("role", f"no such child: {role}")
