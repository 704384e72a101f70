"""Coordinator, target worker and draft worker as one supervised unit."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path

from paceline import assets
from paceline.core import limits
from paceline.core.clock import monotonic
from paceline.core.config import CoordinatorConfig, DraftConfig, TargetConfig, WorkerConfig
from paceline.core.errors import InvalidArgumentError, TokenizerMismatchError
from paceline.core.fingerprint import vocabulary_fingerprint
from paceline.core.security.secret import VARIABLE as SECRET_VARIABLE
from paceline.core.security.secret import new_secret
from paceline.core.security.tls import Tls
from paceline.supervisor.announcement import split_address
from paceline.supervisor.arguments import Config, arguments, variable
from paceline.supervisor.children import (
    STOP_MARGIN,
    ChildSpec,
    ChildStatus,
    Sink,
    Supervisor,
    log_to_stderr,
)
from paceline.supervisor.folders import owned_folder, working_folder
from paceline.supervisor.preflight import check_stack
from paceline.supervisor.stack_config import StackConfig
from paceline.telemetry.steps import step

_SHORT = "/tmp"  # noqa: S108 - a folder of our own in it
_ROOM = len("/paceline-12345678/12345.sock")
"""Of a socket's path in such a folder."""

PROGRAM = (sys.executable, "-P", "-m", "paceline")
"""The `paceline` command, of this interpreter."""
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - recognised, not bound


def check_tokenizers(target_model: str, draft_model: str) -> None:
    """Refuse two local models with different vocabularies before anything is loaded.

    Models that are not local folders with a tokenizer.json pass; the coordinator compares them later.
    Raises TokenizerMismatchError naming both.
    """
    prints = [
        _fingerprint(field, model)
        for field, model in (("target_model", target_model), ("draft_model", draft_model))
    ]
    if None not in prints and prints[0] != prints[1]:
        raise TokenizerMismatchError(
            "draft_model",
            f"the draft {draft_model} (tokenizer {prints[1]:.12}) and the target {target_model} "
            f"(tokenizer {prints[0]:.12}) do not share a vocabulary",
        )


def _fingerprint(field: str, model: str) -> str | None:
    file = Path(assets.resolve(model)) / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        vocabulary = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises nothing more special
        raise InvalidArgumentError(field, f"{file} cannot be read: {error}") from None
    return vocabulary_fingerprint(vocabulary)


class Stack:
    """A running stack. Roles are `target`, `draft` and `coordinator`."""

    def __init__(
        self,
        config: StackConfig,
        supervisor: Supervisor,
        sockets: Path | None,
        environment: Mapping[str, str],
        folder: str | None,
    ) -> None:
        """`sockets` is the folder for the workers' local sockets, if they have any; all processes have this
        `environment` and working `folder`, whatever becomes of ours."""
        self.config = config
        self.supervisor = supervisor
        self._sockets = sockets
        self._environment = environment
        self._folder = folder
        self._workers = 0

    @property
    def roles(self) -> tuple[str, ...]:
        """Every process there is, in the order of their start."""
        return (*self.config.worker_roles, "coordinator")

    @property
    def address(self) -> str:
        """Where clients on this machine reach the coordinator."""
        return self.address_of("coordinator")

    def address_of(self, role: str) -> str:
        """Where a process listens; it stays the same across restarts."""
        return _reachable(self.supervisor.status(role).address)

    @property
    def http_address(self) -> str:
        """Where clients on this machine reach the HTTP face; empty without it."""
        address = self.supervisor.status("coordinator").http_address
        return _reachable(address) if address else ""

    @property
    def coordinator_tls(self) -> Tls | None:
        """Of the ports for clients; None is plain text."""
        return self.config.coordinator_config(("127.0.0.1:1",), ()).tls

    def pid(self, role: str) -> int:
        """The present process. Raises DeadlineExceededError if none comes up within half a minute, and
        UnavailableError if none is to, since the stack is being stopped."""
        pid = self.supervisor.wait_until(role, lambda s: s.pid is not None, 30.0).pid
        assert pid is not None
        return pid

    def kill(self, role: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal; returns the pid it went to, for `wait_for_restart`."""
        return self.supervisor.signal(role, number)

    def wait_for_restart(self, role: str, after: int | None = None, timeout: float = 120.0) -> ChildStatus:
        """Wait until a process other than `after` is ready; None stands for the role's first process.

        Raises DeadlineExceededError, and UnavailableError if the stack is being stopped.
        """
        if after is None:
            return self.supervisor.wait_until(role, lambda s: s.ready and s.starts > 1, timeout)
        return self.supervisor.wait_until(role, lambda s: s.ready and s.pid != after, timeout)

    def add(self, role: str, command: str, config: Config, *, timeout: float | None = None) -> ChildStatus:
        """Start one more process and wait until it is ready; it is stopped before those there already.

        `role` names it and must be new, `command` is its `paceline` command. `timeout` None is the
        `start_timeout` of the stack. Raises ChildFailedError, and then the process is gone.
        """
        (status,) = self.start((role, command, config), timeout=timeout)
        return status

    def start(self, *processes: tuple[str, str, Config], timeout: float | None = None) -> list[ChildStatus]:
        """The same for several at a time."""
        specs = [self._process(role, command, self._reached(config)) for role, command, config in processes]
        return self.supervisor.start(specs, self.config.start_timeout if timeout is None else timeout)

    def _process(self, role: str, command: str, config: Config) -> ChildSpec:
        return ChildSpec(
            role=role,
            command=(*PROGRAM, command, *arguments(replace(config, port=0))),
            port=config.port,
            environment=self._environment,
            folder=self._folder,
            private=self._sockets if self._is_in_ours(config) else None,
        )

    def _is_in_ours(self, config: Config) -> bool:
        """Whether its socket is in the folder that we made."""
        return isinstance(config, WorkerConfig) and Path(config.local_socket).parent == self._sockets

    def _reached(self, config: Config) -> Config:
        """With a socket of its own, if it is a worker's and names none."""
        if self._sockets is None or not isinstance(config, WorkerConfig) or config.local_socket or config.tls:
            return config
        self._workers += 1
        return replace(config, local_socket=str(self._sockets / f"{self._workers}.sock"))

    def wait(self) -> None:
        """Block until a signal raises in the main thread."""
        self.supervisor.wait()


def _reachable(address: str) -> str:
    """An address that was bound, as a client on this machine writes it."""
    host, port = split_address(address)
    return f"{_ANY_HOST.get(host, host)}:{port}"


@contextlib.contextmanager
def serve_stack(
    config: StackConfig, *, sink: Sink = log_to_stderr, stop_timeout: float | None = None
) -> Iterator[Stack]:
    """Run the stack for as long as the block lasts; no process is left behind, whatever ends it.

    A process that has not ended `stop_timeout` seconds after it was told to is killed; None gives the
    coordinator the time to drain.

    Raises InvalidArgumentError, TokenizerMismatchError, or ChildFailedError with a child's own message.
    """
    remaining = _countdown(config.start_timeout)
    check_stack(config)
    if config.draft_model:
        check_tokenizers(config.target_model, config.draft_model)
    # Both once: ours may change, paths may be relative, and a restart must find what the first start found.
    environment = _with_secret(child_environment(config.environment))
    folder = working_folder()
    if stop_timeout is None:
        stop_timeout = config.drain_seconds + STOP_MARGIN
    with (
        _folder_of_sockets(config) as sockets,
        Supervisor(sink=sink, stop_timeout=stop_timeout) as supervisor,
    ):
        stack = Stack(config, supervisor, sockets, environment, folder)
        step("starting the workers (%s)", ", ".join(config.worker_roles))
        workers = stack.start(
            *((role, f"{role}-worker", config.worker_config(role)) for role in config.worker_roles),
            timeout=remaining(),
        )
        targets, drafts = (
            tuple(w.address for w in workers if w.role == role) for role in ("target", "draft")
        )
        coordinator = config.coordinator_config(targets, drafts)
        step("the workers are ready; starting the coordinator")
        stack.add("coordinator", "coordinator", coordinator, timeout=remaining())
        yield stack


def _countdown(seconds: float) -> Callable[[], float]:
    """Tells how many of them are left, in tenths since errors quote it; one tenth at least."""
    deadline = monotonic() + seconds
    return lambda: max(0.1, round(deadline - monotonic(), 1))


@contextlib.contextmanager
def _folder_of_sockets(config: StackConfig) -> Iterator[Path | None]:
    """A folder that only this user may enter, and that is gone with the stack."""
    if not config.uses_local_sockets:
        yield None
        return
    place = tempfile.gettempdir()
    fits = len(os.fsencode(place)) + _ROOM <= limits.MAX_SOCKET_PATH_BYTES
    with owned_folder(Path(place if fits else _SHORT)) as folder:
        yield folder


def child_environment(more: Mapping[str, str]) -> dict[str, str]:
    """Ours, without the variables that would override what children are told on their command line."""
    processes = (TargetConfig, DraftConfig, CoordinatorConfig)
    settings = {variable(f.name) for cls in processes for f in fields(cls)}
    return {name: value for name, value in os.environ.items() if name not in settings} | dict(more)


def _with_secret(environment: Mapping[str, str]) -> dict[str, str]:
    """The same with the secret that all processes of a stack share: what is there, else a random one."""
    return {**environment, SECRET_VARIABLE: environment.get(SECRET_VARIABLE) or new_secret()}
