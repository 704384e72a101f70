"""What a stack runs, and the configuration of each of its processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from paceline.core.checks import AUTO, DraftTokens
from paceline.core.config import (
    HAS_LOCAL_SOCKETS,
    NO_LOCAL_SOCKETS,
    CoordinatorConfig,
    DraftConfig,
    TargetConfig,
    WorkerConfig,
)
from paceline.core.cores import CAN_BIND, usable_cores
from paceline.core.errors import InvalidArgumentError
from paceline.core.types import AcceptanceMode
from paceline.supervisor.processes import CAN_FORK

_ConfigT = TypeVar("_ConfigT", DraftConfig, TargetConfig, CoordinatorConfig)

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

_OF_THE_DRAFT = ("draft", "lookahead_")
"""How names of StackConfig's fields begin that say nothing without a draft worker; all but its model's."""

_FEW_SEQUENCES: Final = 1
"""As many as leave a draft time to fill on cores that the coordinator shares with the models."""
_NVIDIA = Path("/dev/nvidia0")


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
    bind_cores: bool | None = None
    """Each model computes on cores of its own, and all else keeps off the target's. If not given, where a
    draft that drafts ahead and its target have one core each, and there is no third."""
    lookahead_branches: int | None = None
    """Outcomes of a verification to draft ahead for while it runs; 0 waits for the verdict. If not given,
    as many as a draft worker's default where each model has a core, else 0."""
    lookahead_sequences: int | None = None
    """Sequences up to which that is done. If not given, a draft worker's default where the models leave a
    core to the rest, else 1."""
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
    local_sockets: bool | None = None
    """Frames between the processes go through Unix sockets, with less work than through gRPC. If not given,
    where the system has them and there are no certificates."""
    fork_workers: bool | None = None
    """Workers that compute on the CPU are forked from a process that has loaded their libraries: they start,
    and restart, in a third of the time. If not given, where the system can."""
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
    """More fields of the target's TargetConfig; they win over the ones above."""
    draft: Mapping[str, Any] = field(default_factory=dict)
    """The same for the draft's DraftConfig."""
    coordinator: Mapping[str, Any] = field(default_factory=dict)
    """The same for the coordinator's CoordinatorConfig."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to what the children inherit."""

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError naming the field: every process's configuration is built once."""
        if self.start_timeout <= 0:
            raise InvalidArgumentError("start_timeout", "must be positive")
        if not self.draft_model:
            self._refuse_what_a_draft_would_need()
        if self.local_sockets and self.certificates:
            raise InvalidArgumentError(
                "local_sockets", "know no certificates, so they cannot be used with certificates"
            )
        if self.local_sockets and not HAS_LOCAL_SOCKETS:
            raise InvalidArgumentError("local_sockets", NO_LOCAL_SOCKETS)
        if self.fork_workers and not CAN_FORK:
            raise InvalidArgumentError("fork_workers", "is not possible on this system")
        if self.bind_cores:
            if not CAN_BIND:
                raise InvalidArgumentError("bind_cores", "is not possible on this system")
            needed, there = sum(map(self._threads_of, self.worker_roles)), len(usable_cores())
            if needed > there:
                raise InvalidArgumentError("bind_cores", f"needs {needed} cores, there are {there}")
        workers = [self.worker_config(role) for role in self.worker_roles]
        if self.fork_workers and not any(map(self.forks, workers)):
            raise InvalidArgumentError(
                "fork_workers", "is of workers that compute on the CPU, and none is sure to"
            )
        self.coordinator_config(("127.0.0.1:1",), ())

    def _refuse_what_a_draft_would_need(self) -> None:
        for f in fields(self):
            default = {} if f.default is MISSING else f.default
            concerns = f.name.startswith(_OF_THE_DRAFT) and f.name != "draft_model"
            if concerns and getattr(self, f.name) != default:
                raise InvalidArgumentError(f.name, "is of a draft worker, and draft_model says there is none")

    @property
    def uses_local_sockets(self) -> bool:
        """What `local_sockets` says, or what it is if not given."""
        if self.local_sockets is None:
            return HAS_LOCAL_SOCKETS and not self.certificates
        return self.local_sockets

    def forks(self, worker: WorkerConfig) -> bool:
        """Whether such a worker is forked. A context of CUDA does not outlive a fork, so that nothing which
        might have one is."""
        wanted = CAN_FORK if self.fork_workers is None else self.fork_workers
        return wanted and _on_cpu(worker.device)

    @property
    def worker_roles(self) -> tuple[str, ...]:
        """Which workers there are."""
        return ("target", "draft") if self.draft_model else ("target",)

    def worker_config(self, role: str) -> DraftConfig | TargetConfig:
        """The configuration of the `target` or the `draft` worker."""
        return self.target_config if role == "target" else self.draft_config

    @property
    def target_config(self) -> TargetConfig:
        """Of the target worker."""
        values = {**self._shared_by("target"), "pre_verify": not self._share_a_core}
        return _build(TargetConfig, {**values, **self.target, "exit_with_parent": True}, "target")

    @property
    def draft_config(self) -> DraftConfig:
        """Of the draft worker."""
        ahead = {"lookahead_branches": self._branches, "lookahead_sequences": self._ahead_of}
        values = self._shared_by("draft") | {name: n for name, n in ahead.items() if n is not None}
        return _build(DraftConfig, {**values, **self.draft, "exit_with_parent": True}, "draft")

    def _shared_by(self, role: str) -> dict[str, Any]:
        """What both workers have, of one of them."""
        prefix = f"{role}_"
        values = {
            name: getattr(self, prefix + name)
            for name in ("model", "port", "device", "dtype", "metrics_port")
        }
        values["threads"] = self._threads_of(role)
        values["cores"] = self._cores_of(role) if self._binds else ()
        values["message_cores"] = self._message_cores
        values |= {name: getattr(self, name) for name in _SHARED}
        return values | self._certificate_of(role, "tls")

    def _threads_of(self, role: str) -> int:
        own: Mapping[str, Any] = getattr(self, role)
        threads: int = own.get("threads", 0) or getattr(self, f"{role}_threads")
        return threads or _threads(len(self.worker_roles))

    def _cores_of(self, role: str) -> tuple[int, ...]:
        """As many as it has threads: the target's are the first ones."""
        before = 0 if role == "target" else self._threads_of("target")
        return usable_cores()[before : before + self._threads_of(role)]

    @property
    def _message_cores(self) -> tuple[int, ...]:
        """Those of all that is no model, in every process: any but the target's. Nobody waits for a draft
        while it drafts ahead, and where everybody waits for it there is nothing else to do."""
        if not self._binds:
            return ()
        targets = self.target.get("cores") or self._cores_of("target")
        return tuple(core for core in usable_cores() if core not in targets)

    @property
    def _binds(self) -> bool:
        """What `bind_cores` says, or what it is if not given.

        Models that take turns are in nobody's way, and with cores to spare the system finds room by itself.
        """
        if self.bind_cores is None:
            one_each = [self._threads_of(role) for role in self.worker_roles] == [1, 1]
            ahead = self.draft.get("lookahead_branches", self._branches)
            return CAN_BIND and one_each and ahead != 0 and self._crowded and len(usable_cores()) == 2
        return self.bind_cores

    @property
    def _branches(self) -> int | None:
        """Of the draft worker; None leaves it its default."""
        return 0 if self.lookahead_branches is None and self._share_a_core else self.lookahead_branches

    @property
    def _share_a_core(self) -> bool:
        """Where they do, what one of them computes ahead of the other takes that one's time."""
        return self._crowded and len(usable_cores()) < len(self.worker_roles)

    @property
    def _ahead_of(self) -> int | None:
        """Sequences that the draft worker drafts ahead of; None leaves it its default."""
        if self.lookahead_sequences is None and self._crowded:
            return _FEW_SEQUENCES
        return self.lookahead_sequences

    @property
    def _crowded(self) -> bool:
        """True when both models compute on all cores there are.

        The coordinator and the workers' own sockets need a core besides: with more than a few sequences
        drafting ahead takes the time it saves.
        """
        on_cpu = {self.target_device, self.draft_device} <= {"auto", "cpu"} and not _NVIDIA.exists()
        return on_cpu and len(usable_cores()) <= len(self.worker_roles)

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
            "message_cores": self._message_cores,
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


def _on_cpu(device: str) -> bool:
    return device == "cpu" or (device == "auto" and not _NVIDIA.exists())


def _threads(workers: int) -> int:
    """Torch's threads spin while they wait, so workers must not share cores.

    A worker that is alone leaves one to the coordinator: on two cores the embedded target decodes four
    times faster with one thread than with both.
    """
    cores = len(usable_cores())
    return max(1, min(cores // workers, cores - 1))
