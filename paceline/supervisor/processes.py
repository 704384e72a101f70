"""Processes with pipes to their standard streams: executed, or forked from one that has loaded libraries.

A fork server saves what importing costs: most of the seconds that a worker needs to start, and of those that
a restart keeps requests waiting (docs/decisions/0056-workers-are-forked.md). forking.py is its other end.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any, Final, Protocol

from paceline.supervisor.folders import working_folder
from paceline.supervisor.forking import PACKET

logger = logging.getLogger(__name__)

CAN_FORK = sys.platform == "linux" and hasattr(os, "pidfd_open")
_UNKNOWN = 1
"""Exit code of a child whose fork server ended before it: nobody can say."""
_PATIENCE = 15.0
"""Seconds that a fork server, which has nothing else to do, may take to fork."""
_held: Final[weakref.WeakSet[io.RawIOBase | socket.socket]] = weakref.WeakSet()
"""Our ends of what tells children, and fork servers, by closing that we are gone."""


def _let_go() -> None:
    """Close them in a process forked from ours, as by `multiprocessing`: it may outlive us, and with them so
    would all children. Only descriptors: another thread may have held the lock of a buffer over one."""
    for end in list(_held):
        with contextlib.suppress(OSError):
            end.close()


os.register_at_fork(after_in_child=_let_go)


def _hold(stdin: IO[str] | None) -> None:
    assert isinstance(stdin, io.TextIOWrapper)
    _held.add(stdin.buffer.raw)


class Process(Protocol):
    """A running process; what `subprocess.Popen` is too."""

    @property
    def pid(self) -> int:
        """Process id."""

    @property
    def stdin(self) -> IO[str] | None:
        """A pipe to it."""

    @property
    def stdout(self) -> IO[str] | None:
        """A pipe from it."""

    @property
    def stderr(self) -> IO[str] | None:
        """A pipe from it."""

    def wait(self) -> int:
        """Block until it has ended; its exit code, or minus the number of the signal that ended it."""

    def send_signal(self, sig: int) -> None:
        """Nothing happens if it has ended."""


Start = Callable[[Sequence[str], Mapping[str, str] | None, str | None], Process]
"""Starts a command in a process group of its own; environment and working folder None are ours. A folder that
is gone is ours too. Raises OSError."""


def start_process(
    command: Sequence[str], environment: Mapping[str, str] | None, folder: str | None = None
) -> Process:
    """By executing the program."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=folder if folder is not None and Path(folder).is_dir() else None,
        text=True,
        errors="replace",
        process_group=0,
    )
    _hold(process.stdin)
    return process


class _Forked:
    """A child of the fork server."""

    def __init__(self, pid: int, ending: int, ended: Future[int], streams: Sequence[IO[str]]) -> None:
        """`ending` is its pidfd."""
        self.pid = pid
        self.stdin, self.stdout, self.stderr = streams
        self._ending = ending
        self._ended = ended
        weakref.finalize(self, os.close, ending)

    def wait(self) -> int:
        ending = select.poll()
        ending.register(self._ending, select.POLLIN)
        ending.poll()
        try:
            return self._ended.result(_PATIENCE)
        except TimeoutError:  # the fork server is stopped, and does not look after its children
            return _UNKNOWN

    def send_signal(self, sig: int) -> None:
        # Whoever has its number by then, a pidfd never means another process.
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._ending, sig)


class ForkServer:
    """A process that is forked instead of starting `program` again; while the `with` block lasts.

    What it cannot do is started as usual: other programs, other environments than it was started with, which
    libraries may have looked at when they were loaded, and other working folders than ours was then. One that
    dies after it was loaded is replaced when it is next asked, and children are started as usual while its
    successor loads; what cannot be loaded is not tried again.
    """

    def __init__(
        self, program: Sequence[str], server_arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """The fork server is `program` with `server_arguments` and the number of its socket."""
        self._program = tuple(program)
        self._server_arguments = tuple(server_arguments)
        self._environment = dict(environment)
        self._folder = working_folder()
        self._asking = threading.Lock()
        self._loaded = False
        self._loading = False
        """A successor was started that has not said yet that it is loaded."""
        self._launch()

    def _launch(self) -> None:
        """Start the process, or its successor."""
        self._replies: queue.SimpleQueue[tuple[dict[str, Any], list[int]] | None] = queue.SimpleQueue()
        """None is the end."""
        self._ended: dict[int, Future[int]] = {}
        """Exit codes to come, by process id; the reader's alone."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _held.add(self._control)
        with theirs:
            self._process = subprocess.Popen(
                [*self._program, *self._server_arguments, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what keeps it from loading keeps others too, and these say so
                env=self._environment,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        self._reader = threading.Thread(target=self._read, name="fork server", daemon=True)
        self._reader.start()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def environment(self) -> Mapping[str, str]:
        """That of the processes which are forked."""
        return self._environment

    def wait_until_loaded(self, timeout: float) -> None:
        """Block until it can be forked at once. One that has ended by then, or takes longer, is not used."""
        with self._asking:
            self._loaded = self._reply(timeout) is not None

    def close(self) -> None:
        """End it. Its children live on; idempotent."""
        self._loaded = False
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._control.close()

    def start(
        self, command: Sequence[str], environment: Mapping[str, str] | None, folder: str | None = None
    ) -> Process:
        """Fork where that is the same as executing. Raises OSError."""
        size = len(self._program)
        there = (working_folder() if folder is None else folder) == self._folder
        if there and tuple(command[:size]) == self._program and environment == self._environment:
            with self._asking:
                forked = self._fork(command[size:]) if self._is_there() else None
                if forked is None:
                    self._replace_if_dead()
            if forked is not None:
                return forked
        return start_process(command, environment, folder)

    def _is_there(self) -> bool:
        """False while a successor loads."""
        if self._loading and not self._replies.empty():
            self._loading, self._loaded = False, self._reply(0) is not None
        return not self._loading

    def _replace_if_dead(self) -> None:
        """Start a successor of one that died after it was loaded. Nobody waits until it is loaded: a
        supervisor starts children under the lock by which it stops them. Raises OSError."""
        if self._loading or not self._loaded or self._process.poll() is None:
            return
        logger.warning("the fork server has ended; another one is started")
        self._reader.join()
        self._control.close()
        self._launch()
        self._loading = True

    def _fork(self, arguments: Sequence[str]) -> Process | None:
        """None if that is not possible. Raises OSError where there is no room for its pipes."""
        ours: list[IO[str]] = []
        with contextlib.ExitStack() as unused:
            with contextlib.ExitStack() as passed_on:
                theirs: list[int] = []
                for its_end, mode in ((0, "w"), (1, "r"), (1, "r")):  # its input, output and error
                    pipe = os.pipe()
                    theirs.append(pipe[its_end])
                    passed_on.callback(os.close, pipe[its_end])
                    stream = os.fdopen(pipe[1 - its_end], mode, errors="replace")
                    ours.append(unused.enter_context(stream))
                _hold(ours[0])
                reply = self._ask(arguments, theirs)
            if isinstance(reply, str):
                logger.warning("cannot fork: %s", reply)
                return None
            unused.pop_all()
        message, ending = reply
        return _Forked(message["pid"], ending, message["ended"], ours)

    def _ask(self, arguments: Sequence[str], streams: Sequence[int]) -> tuple[dict[str, Any], int] | str:
        """What it says of a new child, and the child's pidfd; or why there is none."""
        try:
            socket.send_fds(self._control, [json.dumps({"arguments": list(arguments)}).encode()], streams)
            reply = self._reply(_PATIENCE)
        except ConnectionError:
            self._reader.join()
            reply = None
        except OSError:
            reply = None
        if reply is None:
            return "it has ended"
        message, descriptors = reply
        if "error" in message:
            return str(message["error"])
        if not descriptors:
            # At our limit of descriptors the system drops what it cannot hand over. Nobody could wait for
            # this child, or be sure to signal no other one.
            with contextlib.suppress(ProcessLookupError):
                os.kill(message["pid"], signal.SIGKILL)
            return "there is no room for a descriptor of the child"
        return message, descriptors[0]

    def _reply(self, timeout: float) -> tuple[dict[str, Any], list[int]] | None:
        try:
            reply = self._replies.get(timeout=timeout)
        except queue.Empty:
            self._process.kill()  # an answer that comes later would be taken for that of another request
            reply = self._replies.get()
        if reply is None:
            self._replies.put(None)  # for whoever asks next
        return reply

    def _read(self) -> None:
        """Deal out what it says, until it says no more. Whatever ends that, nobody waits for more of it."""
        try:
            while self._take():
                pass
        except OSError:
            pass
        except Exception:
            logger.exception("the fork server cannot be understood")
        finally:
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)  # a child that it forked now would be nobody's
            self._process.kill()
            self._process.wait()  # else it stays a zombie
            self._replies.put(None)
            for ended in self._ended.values():
                ended.set_result(_UNKNOWN)

    def _take(self) -> bool:
        """Deal out one message; False at its end."""
        packet, descriptors, _, _ = socket.recv_fds(self._control, PACKET, 1)
        if not packet:
            return False
        message: dict[str, Any] = json.loads(packet)
        if "code" in message:
            ended = self._ended.pop(message["pid"], None)
            if ended is not None:  # else a child that was given up for want of its descriptor
                ended.set_result(message["code"])
            return True
        if descriptors:
            # Here, since the next packet may tell of its end.
            message["ended"] = self._ended[message["pid"]] = Future()
        self._replies.put((message, descriptors))
        return True
