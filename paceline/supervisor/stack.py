"""A coordinator, a target worker and draft workers as one supervised unit."""

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
from paceline.supervisor.devices import kind_of
from paceline.supervisor.folders import owned_folder, working_folder
from paceline.supervisor.preflight import check_stack
from paceline.supervisor.stack_config import StackConfig
from paceline.telemetry.steps import step

_SHORT_FOLDER = "/tmp"  # noqa: S108 - only for a private folder in it
_SOCKET_NAME_LENGTH = len("/paceline-12345678/12345.sock")
"""Length of a socket's path within the temporary folder."""

PROGRAM = (sys.executable, "-P", "-m", "paceline")
"""The `paceline` command of this interpreter."""
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - compared, not bound


def check_tokenizers(target_model: str, draft_model: str) -> None:
    """Refuse two local models with different vocabularies before loading them.

    Models without a local tokenizer.json are not checked here; the coordinator compares them later. Raises
    TokenizerMismatchError naming both.
    """
    target, draft = _vocabulary("target_model", target_model), _vocabulary("draft_model", draft_model)
    if target is not None and draft is not None and target != draft:
        raise TokenizerMismatchError(
            "draft_model",
            f"the draft {draft_model} and the target {target_model} do not share a vocabulary: "
            f"{_difference(draft, target)}",
        )


def _difference(draft: Mapping[str, int], target: Mapping[str, int]) -> str:
    """The least token id in which two vocabularies differ, and their sizes."""
    first = min(token_id for _, token_id in draft.items() ^ target.items())
    found = [[token for token, token_id in each.items() if token_id == first] for each in (draft, target)]
    names = [repr(tokens[0]) if tokens else "missing" for tokens in found]
    return (
        f"token {first} is {names[0]} in the draft ({len(draft)} tokens) "
        f"and {names[1]} in the target ({len(target)} tokens)"
    )


def _vocabulary(field: str, model: str) -> dict[str, int] | None:
    file = Path(assets.resolve(model)) / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        vocabulary: dict[str, int] = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    except Exception as error:  # tokenizers raises plain Exception
        raise InvalidArgumentError(field, f"{file} cannot be read: {error}") from None
    return vocabulary


class Stack:
    """A running stack. Roles are `target`, `draft`, `draft-2` and so on, and `coordinator`."""

    def __init__(
        self,
        config: StackConfig,
        supervisor: Supervisor,
        sockets: Path | None,
        environment: Mapping[str, str],
        folder: str | None,
    ) -> None:
        """`sockets` is the folder of the workers' local sockets, if any. All processes keep this
        `environment` and working `folder` even if this process's change."""
        self.config = config
        self.supervisor = supervisor
        self._sockets = sockets
        self._environment = environment
        self._folder = folder
        self._workers = 0

    @property
    def roles(self) -> tuple[str, ...]:
        """All processes in starting order."""
        return (*self.config.worker_roles, "coordinator")

    @property
    def address(self) -> str:
        """The coordinator's address for clients on this machine."""
        return self.address_of("coordinator")

    def address_of(self, role: str) -> str:
        """A process's address, which stays the same across restarts."""
        return _reachable(self.supervisor.status(role).address)

    @property
    def http_address(self) -> str:
        """The HTTP address for clients on this machine; empty without HTTP."""
        address = self.supervisor.status("coordinator").http_address
        return _reachable(address) if address else ""

    @property
    def coordinator_tls(self) -> Tls | None:
        """TLS of the client ports; None means plain text."""
        return self.config.coordinator_config(("127.0.0.1:1",), ()).tls

    def pid(self, role: str) -> int:
        """The current process. Waits up to 30 s for one. Raises DeadlineExceededError, or UnavailableError if
        the stack is being stopped."""
        pid = self.supervisor.wait_until(role, lambda s: s.pid is not None, 30.0).pid
        assert pid is not None
        return pid

    def kill(self, role: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal and return the pid of its receiver, for `wait_for_restart`."""
        return self.supervisor.signal(role, number)

    def wait_for_restart(self, role: str, after: int | None = None, timeout: float = 120.0) -> ChildStatus:
        """Wait until a process other than `after` is ready; None means the role's first process.

        Raises DeadlineExceededError, or UnavailableError if the stack is being stopped.
        """
        if after is None:
            return self.supervisor.wait_until(role, lambda s: s.ready and s.starts > 1, timeout)
        return self.supervisor.wait_until(role, lambda s: s.ready and s.pid != after, timeout)

    def add(self, role: str, command: str, config: Config, *, timeout: float | None = None) -> ChildStatus:
        """Start another process and wait until it is ready. It is stopped before the existing ones.

        `role` is a new name, `command` a `paceline` command. `timeout` None means the stack's
        `start_timeout`. Raises ChildFailedError after stopping the process.
        """
        (status,) = self.start((role, command, config), timeout=timeout)
        return status

    def start(self, *processes: tuple[str, str, Config], timeout: float | None = None) -> list[ChildStatus]:
        """As `add`, for several processes together."""
        specs = [
            self._process(role, command, self._with_socket(config)) for role, command, config in processes
        ]
        return self.supervisor.start(specs, self.config.start_timeout if timeout is None else timeout)

    def _process(self, role: str, command: str, config: Config) -> ChildSpec:
        return ChildSpec(
            role=role,
            command=(*PROGRAM, command, *arguments(replace(config, port=0))),
            port=config.port,
            environment=self._environment,
            folder=self._folder,
            private=self._sockets if self._is_in_own_folder(config) else None,
        )

    def _is_in_own_folder(self, config: Config) -> bool:
        """Whether the worker's socket is in this stack's folder."""
        return isinstance(config, WorkerConfig) and Path(config.local_socket).parent == self._sockets

    def _with_socket(self, config: Config) -> Config:
        """The configuration with a local socket added, if it is a worker's without one."""
        if self._sockets is None or not isinstance(config, WorkerConfig) or config.local_socket or config.tls:
            return config
        self._workers += 1
        return replace(config, local_socket=str(self._sockets / f"{self._workers}.sock"))

    def wait(self) -> None:
        """Block until a signal raises in the main thread."""
        self.supervisor.wait()


def _reachable(address: str) -> str:
    """A bound address as clients on this machine use it."""
    host, port = split_address(address)
    return f"{_ANY_HOST.get(host, host)}:{port}"


@contextlib.contextmanager
def serve_stack(
    config: StackConfig, *, sink: Sink = log_to_stderr, stop_timeout: float | None = None
) -> Iterator[Stack]:
    """Run the stack during the block. All processes end with the block, however it ends.

    A process that does not end within `stop_timeout` seconds is killed; None allows the coordinator's drain
    timeout.

    Raises InvalidArgumentError, TokenizerMismatchError, or ChildFailedError with a child's own message.
    """
    remaining = _countdown(config.start_timeout)
    check_stack(config)
    for model in config.draft_models:
        check_tokenizers(config.target_model, model)
    # Fixed once: relative paths and variables must have the same meaning for a restart.
    environment = _with_secret(child_environment(config.environment))
    folder = working_folder()
    if stop_timeout is None:
        stop_timeout = config.drain_seconds + STOP_MARGIN
    with (
        _folder_of_sockets(config) as sockets,
        Supervisor(sink=sink, stop_timeout=stop_timeout) as supervisor,
    ):
        stack = Stack(config, supervisor, sockets, environment, folder)
        if sharing := config.sharing:
            step("%s", sharing)
        step("starting the workers (%s)", ", ".join(config.worker_roles))
        workers = stack.start(
            *((role, f"{kind_of(role)}-worker", config.worker_config(role)) for role in config.worker_roles),
            timeout=remaining(),
        )
        targets, drafts = (
            tuple(w.address for w in workers if kind_of(w.role) == kind) for kind in ("target", "draft")
        )
        coordinator = config.coordinator_config(targets, drafts)
        step("the workers are ready; starting the coordinator")
        stack.add("coordinator", "coordinator", coordinator, timeout=remaining())
        yield stack


def _countdown(seconds: float) -> Callable[[], float]:
    """A function that returns the remaining seconds, at least 0.1, rounded to tenths for error messages."""
    deadline = monotonic() + seconds
    return lambda: max(0.1, round(deadline - monotonic(), 1))


@contextlib.contextmanager
def _folder_of_sockets(config: StackConfig) -> Iterator[Path | None]:
    """A private folder for sockets, removed with the stack; None without local sockets."""
    if not config.uses_local_sockets:
        yield None
        return
    place = tempfile.gettempdir()
    fits = len(os.fsencode(place)) + _SOCKET_NAME_LENGTH <= limits.MAX_SOCKET_PATH_BYTES
    with owned_folder(Path(place if fits else _SHORT_FOLDER)) as folder:
        yield folder


def child_environment(more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without variables that set the children's options."""
    processes = (TargetConfig, DraftConfig, CoordinatorConfig)
    settings = {variable(f.name) for cls in processes for f in fields(cls)}
    return {name: value for name, value in os.environ.items() if name not in settings} | dict(more)


def _with_secret(environment: Mapping[str, str]) -> dict[str, str]:
    """Add the worker secret of the stack: the existing one, else a random one."""
    return {**environment, SECRET_VARIABLE: environment.get(SECRET_VARIABLE) or new_secret()}
