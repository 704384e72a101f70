"""Coordinator, target worker and draft worker as one supervised unit."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from paceline import assets
from paceline.core.checks import AUTO, DraftTokens
from paceline.core.config import CoordinatorConfig, WorkerConfig
from paceline.core.errors import InvalidArgumentError, TokenizerMismatchError
from paceline.core.fingerprint import vocabulary_fingerprint
from paceline.core.tls import Tls
from paceline.core.types import AcceptanceMode
from paceline.supervisor.announcement import split_address
from paceline.supervisor.arguments import Config, arguments, variable
from paceline.supervisor.children import (
    STOP_TIMEOUT,
    ChildSpec,
    ChildStatus,
    Sink,
    Supervisor,
    log_to_stderr,
)

_ConfigT = TypeVar("_ConfigT", WorkerConfig, CoordinatorConfig)

_SHARED = (
    "block_size",
    "num_blocks",
    "max_model_len",
    "prefix_cache",
    "deterministic",
    "cuda_graphs",
    "trust_remote_code",
    "log_format",
    "otlp_traces_endpoint",
    "reflection",
)
"""Fields of both workers' WorkerConfig."""

_NVIDIA = Path("/dev/nvidia0")

_ANY_HOST = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - recognised, not bound


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """One target, at most one draft and their coordinator on this machine.

    Workers listen on 127.0.0.1, the coordinator on `host`. Port 0 takes a free one.
    """

    target_model: str = "embedded:target"
    draft_model: str | None = "embedded:draft"
    """`none` on the command line, None here: no draft worker; only what a text repeats is proposed."""
    host: str = "127.0.0.1"
    port: int = 0
    http: bool = True
    """Serve the OpenAI-compatible HTTP face."""
    http_port: int = 0
    """Port of the HTTP face, on the same host; 0 takes a free one."""
    chat_template: str = ""
    """A file with a Jinja chat template; empty takes the tokenizer's own."""
    target_port: int = 0
    draft_port: int = 0
    num_speculative_tokens: DraftTokens = AUTO
    max_num_speculative_tokens: int = 8
    """The most draft tokens of a round where K is `auto`."""
    acceptance: AcceptanceMode = AcceptanceMode.COUPLED
    prompt_lookup: bool = True
    """Copy draft tokens from a sequence's own text where that is worth more than asking the draft."""
    target_device: str = "auto"
    draft_device: str = "auto"
    target_dtype: str = "auto"
    draft_dtype: str = "auto"
    target_threads: int = 0
    """CPU threads; 0 divides the cores by the number of workers, and leaves one where there is one worker."""
    draft_threads: int = 0
    lookahead_branches: int | None = None
    """Outcomes of a verification to draft ahead for while it runs; 0 waits for the verdict. If not given,
    as many as a draft worker's default where the models leave a core to the rest, else 0."""
    block_size: int = 16
    num_blocks: int | None = None
    max_model_len: int | None = None
    deterministic: bool = False
    """Serve only if a token's logits are bitwise the same whatever K is and whoever shares the pass."""
    cuda_graphs: bool = True
    """Record passes of common shapes on a CUDA device and replay them; a model that cannot be recorded is
    served without."""
    prefix_cache: bool = True
    """Keep what ended requests computed, for those that begin with the same tokens."""
    trust_remote_code: bool = False
    certificates: str = ""
    """Folder that `deploy/make-certificates` wrote: TLS on every port, of the workers with certificates of
    both ends."""
    tls_certificate: str = ""
    """PEM file with the certificate of the ports for clients; empty takes the folder's coordinator.pem."""
    tls_key: str = ""
    """PEM file with that certificate's private key."""
    tls_ca: str = ""
    """PEM file with the authority of the clients: who shows no certificate of it is refused."""
    api_keys: str = ""
    """File of API keys, as `paceline keys` writes it; none admits everybody."""
    log_format: str = "text"
    """Log lines of all processes as text or as json."""
    otlp_traces_endpoint: str = ""
    """Where all processes send spans with OTLP over gRPC, such as http://localhost:4317; empty makes none."""
    otlp_traces_sampling_ratio: float = 1.0
    """Share of the requests that are traced, of those that do not say so themselves."""
    target_metrics_port: int | None = None
    """Port of the target worker's `/metrics`; 0 takes a free one, none given serves none."""
    draft_metrics_port: int | None = None
    """The same for the draft."""
    reflection: bool = False
    """Describe the gRPC services of all processes to whoever asks (server reflection)."""
    start_timeout: float = 900.0
    """Seconds for all processes to become ready; a first download counts."""
    target: Mapping[str, Any] = field(default_factory=dict)
    """More fields of the target's WorkerConfig; they win over the ones above."""
    draft: Mapping[str, Any] = field(default_factory=dict)
    """The same for the draft."""
    coordinator: Mapping[str, Any] = field(default_factory=dict)
    """The same for the coordinator's CoordinatorConfig."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to what the children inherit."""

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError naming the field: every process's configuration is built once."""
        if self.start_timeout <= 0:
            raise InvalidArgumentError("start_timeout", "must be positive")
        for role in self.worker_roles:
            self.worker_config(role)
        self.coordinator_config(("127.0.0.1:1",), ())

    @property
    def worker_roles(self) -> tuple[str, ...]:
        """Which workers there are."""
        return ("target", "draft") if self.draft_model else ("target",)

    def worker_config(self, role: str) -> WorkerConfig:
        """The configuration of the `target` or the `draft` worker."""
        mine: Mapping[str, Any] = getattr(self, role)
        prefix = f"{role}_"
        values = {
            name: getattr(self, prefix + name)
            for name in ("model", "port", "device", "dtype", "threads", "metrics_port")
        }
        values["threads"] = values["threads"] or _threads(len(self.worker_roles))
        values |= {name: getattr(self, name) for name in _SHARED}
        values |= self._certificate_of(role, "tls")
        if role == "draft":
            branches = self.lookahead_branches
            if branches is not None:
                values["lookahead_branches"] = branches
            elif self._crowded:
                values["lookahead_branches"] = 0
        return _build(WorkerConfig, {**values, **mine, "exit_with_parent": True}, role)

    @property
    def _crowded(self) -> bool:
        """True when drafting ahead takes the time it saves: both models compute on all cores there are.

        The coordinator and the workers' own sockets need a core besides.
        """
        on_cpu = {self.target_device, self.draft_device} <= {"auto", "cpu"} and not _NVIDIA.exists()
        return on_cpu and _cores() <= len(self.worker_roles)

    def coordinator_config(self, targets: tuple[str, ...], drafts: tuple[str, ...]) -> CoordinatorConfig:
        """The coordinator's configuration, once the workers' addresses are known."""
        values = {
            "targets": targets,
            "drafts": drafts,
            "tokenizer": self.target_model,
            "host": self.host,
            "port": self.port,
            "http": self.http,
            "http_port": self.http_port,
            "chat_template": self.chat_template,
            "num_speculative_tokens": self.num_speculative_tokens,
            "max_num_speculative_tokens": self.max_num_speculative_tokens,
            "acceptance": self.acceptance,
            "prompt_lookup": self.prompt_lookup,
            "api_keys": self.api_keys,
            "log_format": self.log_format,
            "otlp_traces_endpoint": self.otlp_traces_endpoint,
            "otlp_traces_sampling_ratio": self.otlp_traces_sampling_ratio,
            "reflection": self.reflection,
        }
        edge = {name: getattr(self, name) for name in ("tls_certificate", "tls_key")}
        if self.certificates and not any(edge.values()):
            edge = self._certificate_of("coordinator", "tls")
        values |= {**edge, "tls_ca": self.tls_ca, **self._certificate_of("coordinator", "worker_tls")}
        return _build(
            CoordinatorConfig, {**values, **self.coordinator, "exit_with_parent": True}, "coordinator"
        )

    def _certificate_of(self, role: str, prefix: str) -> dict[str, str]:
        """A process's files in the folder; nothing without one."""
        if not self.certificates:
            return {}
        names = {"certificate": f"{role}.pem", "key": f"{role}.key", "ca": "ca.pem"}
        return {f"{prefix}_{what}": str(Path(self.certificates) / name) for what, name in names.items()}


def _build(cls: type[_ConfigT], values: Mapping[str, Any], role: str) -> _ConfigT:
    known = {f.name for f in fields(cls)}
    for name in values:
        if name not in known:
            raise InvalidArgumentError(f"{role}.{name}", f"unknown; known are {', '.join(sorted(known))}")
    try:
        return cls(**values)
    except InvalidArgumentError as error:
        own = f"{role}_{error.field}"
        known_as = own if own in {f.name for f in fields(StackConfig)} else error.field
        raise InvalidArgumentError(known_as, error.description) from None


def _threads(workers: int) -> int:
    """Torch's threads spin while they wait, so workers must not share cores.

    A worker that is alone leaves one to the coordinator: on two cores the embedded target decodes four
    times faster with one thread than with both.
    """
    return max(1, min(_cores() // workers, _cores() - 1))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_tokenizers(target_model: str, draft_model: str) -> None:
    """Refuse two local models with different vocabularies before anything is loaded.

    Models that are not local folders with a tokenizer.json pass; the coordinator compares them later.
    Raises TokenizerMismatchError naming both.
    """
    prints = [_fingerprint(model) for model in (target_model, draft_model)]
    if None not in prints and prints[0] != prints[1]:
        raise TokenizerMismatchError(
            "draft_model",
            f"the draft {draft_model} (tokenizer {prints[1]:.12}) and the target {target_model} "
            f"(tokenizer {prints[0]:.12}) do not share a vocabulary",
        )


def _fingerprint(model: str) -> str | None:
    file = Path(assets.resolve(model)) / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        vocabulary = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises nothing more special
        raise InvalidArgumentError("tokenizer", f"{file} cannot be read: {error}") from None
    return vocabulary_fingerprint(vocabulary)


class Stack:
    """A running stack. Roles are `target`, `draft` and `coordinator`."""

    def __init__(self, config: StackConfig, supervisor: Supervisor) -> None:
        self.config = config
        self.supervisor = supervisor

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
        """The present process. Raises DeadlineExceededError if none comes up within half a minute."""
        pid = self.supervisor.wait_until(role, lambda s: s.pid is not None, 30.0).pid
        assert pid is not None
        return pid

    def kill(self, role: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal; returns the pid it went to, for `wait_for_restart`."""
        return self.supervisor.signal(role, number)

    def wait_for_restart(self, role: str, after: int | None = None, timeout: float = 120.0) -> ChildStatus:
        """Wait until a process other than `after` is ready; None stands for the role's first process.

        Raises DeadlineExceededError.
        """
        if after is None:
            return self.supervisor.wait_until(role, lambda s: s.ready and s.starts > 1, timeout)
        return self.supervisor.wait_until(role, lambda s: s.ready and s.pid != after, timeout)

    def add(self, role: str, command: str, config: Config) -> ChildStatus:
        """Start one more process and wait until it is ready; it is stopped before those there already.

        `role` names it and must be new, `command` is its `paceline` command. Raises ChildFailedError.
        """
        process = _process(role, command, config, _environment(self.config.environment))
        (status,) = self.supervisor.start([process], self.config.start_timeout)
        return status

    def wait(self) -> None:
        """Block until a signal raises in the main thread."""
        self.supervisor.wait()


def _reachable(address: str) -> str:
    """An address that was bound, as a client on this machine writes it."""
    host, port = split_address(address)
    return f"{_ANY_HOST.get(host, host)}:{port}"


@contextlib.contextmanager
def serve_stack(
    config: StackConfig, *, sink: Sink = log_to_stderr, stop_timeout: float = STOP_TIMEOUT
) -> Iterator[Stack]:
    """Run the stack for as long as the block lasts; no process is left behind, whatever ends it.

    Raises InvalidArgumentError, TokenizerMismatchError, or ChildFailedError with a child's own message.
    """
    if config.draft_model:
        check_tokenizers(config.target_model, config.draft_model)
    environment = _environment(config.environment)
    with Supervisor(sink=sink, stop_timeout=stop_timeout) as supervisor:
        workers = supervisor.start(
            [
                _process(role, f"{role}-worker", config.worker_config(role), environment)
                for role in config.worker_roles
            ],
            config.start_timeout,
        )
        targets, drafts = (
            tuple(w.address for w in workers if w.role == role) for role in ("target", "draft")
        )
        supervisor.start(
            [_process("coordinator", "coordinator", config.coordinator_config(targets, drafts), environment)],
            config.start_timeout,
        )
        yield Stack(config, supervisor)


def _process(role: str, command: str, config: Config, environment: Mapping[str, str]) -> ChildSpec:
    prefix = (sys.executable, "-P", "-m", "paceline", command)
    return ChildSpec(
        role=role,
        command=(*prefix, *arguments(replace(config, port=0))),
        port=config.port,
        environment=environment,
    )


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """Ours, without the variables that would override what children are told on their command line."""
    settings = {variable(f.name) for cls in (WorkerConfig, CoordinatorConfig) for f in fields(cls)}
    return {name: value for name, value in os.environ.items() if name not in settings} | dict(more)
