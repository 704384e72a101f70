"""Configuration of a stack and of each of its processes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from paceline.core import limits
from paceline.core.config import (
    HAS_LOCAL_SOCKETS,
    MODEL_DRAFTER,
    NO_LOCAL_SOCKETS,
    CoordinatorConfig,
    DraftConfig,
    TargetConfig,
)
from paceline.core.errors import InvalidArgumentError
from paceline.core.system.cores import core_quota, usable_cores, within_quota
from paceline.supervisor.devices import kind_of, on_cpu, parts, sharers
from paceline.supervisor.stack_options import StackOptions

_ConfigT = TypeVar("_ConfigT", DraftConfig, TargetConfig, CoordinatorConfig)

_SHARED = (
    "block_size",
    "max_model_len",
    "max_batch_tokens",
    "max_mixed_prefill_tokens",
    "max_sequences",
    "lease_seconds",
    "prefix_cache",
    "deterministic",
    "cuda_graphs",
    "attention_backend",
    "trust_remote_code",
    "log_format",
    "otlp_traces_endpoint",
    "reflection",
)
"""Fields of both workers' WorkerConfig."""
_ALONE: Final = {"handover_timeout": 0.0}
"""A stack has one worker of each role: nobody could take its sequences."""
_DRAFT_ONLY = ("drafter", "corpus", "sub_drafter", "support_mass", "support_bound")
"""Fields of DraftConfig."""
_COORDINATOR = (
    "model_name",
    "host",
    "port",
    "http",
    "http_port",
    "chat_template",
    "generation_config",
    "num_speculative_tokens",
    "max_num_speculative_tokens",
    "num_speculative_tokens_per_batch_size",
    "tree_width",
    "max_tree_nodes",
    "drafts_per_sequence",
    "acceptance",
    "prompt_lookup",
    "sources",
    "prompt_lookup_min",
    "prompt_lookup_max",
    "suffix_max_tree_depth",
    "suffix_max_spec_factor",
    "suffix_min_token_prob",
    "suffix_cached_requests",
    "draft_timeout",
    "target_timeout",
    "recovery_timeout",
    "max_running",
    "max_waiting",
    "max_request_seconds",
    "resume_seconds",
    "unread_timeout",
    "drain_timeout",
    "api_keys",
    "log_format",
    "otlp_traces_endpoint",
    "otlp_traces_sampling_ratio",
    "log_stats_seconds",
    "tenant_metrics",
    "reflection",
)
"""Fields of CoordinatorConfig."""

_DRAFT_PREFIXES = ("draft", "corpus", "lookahead_", "sub_drafter", "support_")
"""Prefixes of StackConfig's fields that require a draft worker, except `draft_model`."""

_ONE_GPU: Final = 0.85
"""Share of a GPU's memory for weights and caches of two workers together; passes need the rest."""
_FEW_SEQUENCES: Final = 1
"""Most sequences with drafting ahead if the coordinator shares the models' cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig(StackOptions):
    """Validated options, and the configuration of each process."""

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError naming the field. Builds every process's configuration as a check."""
        if not 0 < self.start_timeout <= threading.TIMEOUT_MAX:
            raise InvalidArgumentError("start_timeout", f"must be in (0, {threading.TIMEOUT_MAX:g}]")
        if not self.draft_models:
            self._check_no_draft_options()
        self._check_drafts()
        if self.local_sockets and self.certificates:
            raise InvalidArgumentError(
                "local_sockets", "have no TLS, so they cannot be used with certificates"
            )
        if self.local_sockets and not HAS_LOCAL_SOCKETS:
            raise InvalidArgumentError("local_sockets", NO_LOCAL_SOCKETS)
        self._check_memory()
        for role in self.worker_roles:
            self.worker_config(role)
        self.coordinator_config(("127.0.0.1:1",), ())

    def _check_no_draft_options(self) -> None:
        for f in fields(self):
            default = {} if f.default is MISSING else f.default
            concerns = f.name.startswith(_DRAFT_PREFIXES) and f.name != "draft_model"
            if concerns and getattr(self, f.name) != default:
                raise InvalidArgumentError(f.name, "requires a draft worker, but draft_model is none")

    def _check_drafts(self) -> None:
        if "none" in self.draft_models:
            raise InvalidArgumentError("draft_model", "cannot be none beside other models")
        name, models = "drafts_per_sequence", len(self.draft_models)
        chains = self.acceptance.facts.whole_chain
        most = 1 if chains else limits.MAX_DRAFTS
        if models > most:
            where = f" with acceptance {self.acceptance.value}, which takes no trees" if chains else ""
            raise InvalidArgumentError("draft_model", f"can name at most {most}{where}, got {models}")
        if self.drafts_per_sequence is not None and self.drafts_per_sequence < models:
            why = f"is {self.drafts_per_sequence}, but each of {models} draft models proposes in every round"
            raise InvalidArgumentError(name, why)

    def _check_memory(self) -> None:
        name = "gpu_memory_utilization"
        if self.gpu_memory_utilization is not None:
            _check_share(name, self.gpu_memory_utilization)
            if self.num_blocks is not None:
                raise InvalidArgumentError(name, "cannot be used with num_blocks")
            if not self.may_use_gpus:
                raise InvalidArgumentError(name, "requires a GPU, but no worker is on one")
        for role in self.worker_roles:
            shares = {each: self._gpu_share_of(each) or 0.0 for each in self._sharers(role)}
            if len(shares) > 1 and (total := round(sum(shares.values()), 3)) > 1:
                told = ", ".join(f"{each} {share:g}" for each, share in shares.items())
                raise InvalidArgumentError(f"draft_{name}", f"{told} of one GPU are {total:g} in total")

    @property
    def uses_local_sockets(self) -> bool:
        """`local_sockets`, or its default."""
        if self.local_sockets is None:
            return HAS_LOCAL_SOCKETS and not self.certificates
        return self.local_sockets

    @property
    def draft_models(self) -> tuple[str, ...]:
        """The model of each draft worker."""
        models = self.draft_model or ()
        return (models,) if isinstance(models, str) else models

    @property
    def worker_roles(self) -> tuple[str, ...]:
        """The names of the workers: `target`, `draft`, `draft-2` and so on."""
        further = (f"draft-{number}" for number in range(2, len(self.draft_models) + 1))
        return ("target", *(("draft", *further) if self.draft_models else ()))

    @property
    def may_use_gpus(self) -> bool:
        """True unless all workers compute on a CPU."""
        return not all(on_cpu(self._device_of(role)) for role in self.worker_roles)

    def worker_config(self, role: str) -> DraftConfig | TargetConfig:
        """The configuration of the worker with this name."""
        return self.target_config if role == "target" else self._draft_config(role)

    @property
    def target_config(self) -> TargetConfig:
        """The target worker's configuration."""
        pre_verify = not self._share_a_core if self.pre_verify is None else self.pre_verify
        values = {**self._shared_by("target"), "pre_verify": pre_verify}
        return _build(TargetConfig, {**_ALONE, **values, **self.target, "exit_with_parent": True}, "target")

    @property
    def draft_config(self) -> DraftConfig:
        """The first draft worker's configuration."""
        return self._draft_config("draft")

    def _draft_config(self, role: str) -> DraftConfig:
        ahead = {"lookahead_branches": self._branches, "lookahead_sequences": self._lookahead_limit}
        values = self._shared_by(role) | {name: n for name, n in ahead.items() if n is not None}
        values |= {name: getattr(self, name) for name in _DRAFT_ONLY}
        return _build(DraftConfig, {**_ALONE, **values, **self.draft, "exit_with_parent": True}, "draft")

    def _shared_by(self, role: str) -> dict[str, Any]:
        """Fields common to all workers, for one of them."""
        kind, index = kind_of(role), self._index_of(role)
        values = {name: getattr(self, f"{kind}_{name}") for name in ("device", "dtype")}
        for name in ("port", "metrics_port"):
            first = getattr(self, f"{kind}_{name}")
            values[name] = first + index if first else first
        values["model"] = self.draft_models[index] if kind == "draft" else self.target_model
        values["threads"] = getattr(self, f"{kind}_threads") or self._threads_of(role)
        values["num_blocks"] = self._blocks_of(role)
        values["gpu_memory_utilization"] = self._gpu_share_of(role)
        values |= {name: getattr(self, name) for name in _SHARED}
        return values | self._certificate_of(kind, "tls")

    def _index_of(self, role: str) -> int:
        """The number of earlier workers of the same kind."""
        return [each for each in self.worker_roles if kind_of(each) == kind_of(role)].index(role)

    def _own(self, role: str) -> Mapping[str, Any]:
        """The additional fields in `target` or `draft`."""
        own: Mapping[str, Any] = getattr(self, kind_of(role))
        return own

    def _has_model(self, role: str) -> bool:
        """False for a draft worker whose drafter needs a tokenizer only."""
        drafter = self.draft.get("drafter", self.drafter)
        return role == "target" or drafter == MODEL_DRAFTER

    def _threads_of(self, role: str) -> int:
        return _threads(sum(map(self._has_model, self.worker_roles))) if self._has_model(role) else 1

    def _device_of(self, role: str) -> str:
        if not self._has_model(role):
            return "cpu"
        device: str = self._own(role).get("device", getattr(self, f"{kind_of(role)}_device"))
        return device

    def _blocks_of(self, role: str) -> int | None:
        """Blocks of a worker's cache, without the overrides in `target` and `draft`."""
        own: int | None = getattr(self, f"{kind_of(role)}_num_blocks")
        share = getattr(self, f"{kind_of(role)}_gpu_memory_utilization")
        return self.num_blocks if own is None and share is None else own

    def _gpu_share_of(self, role: str) -> float | None:
        """A worker's share of its GPU; None on a CPU or with an explicit number of blocks.

        Workers on one GPU start together, and each would see the same free memory, so they divide it.
        """
        own = self._own(role)
        share: float | None = getattr(self, f"{kind_of(role)}_gpu_memory_utilization")
        if share is not None or own.get("gpu_memory_utilization") is not None:
            return share
        if self._blocks_of(role) is not None or own.get("num_blocks") is not None:
            return None
        if on_cpu(self._device_of(role)):
            return None
        models = {each: self._model_of(each) for each in self._sharers(role)}
        if len(models) == 1:
            return self.gpu_memory_utilization
        return round((self.gpu_memory_utilization or _ONE_GPU) * parts(models)[role], 4)

    def _model_of(self, role: str) -> str:
        named = self.draft_models[self._index_of(role)] if kind_of(role) == "draft" else self.target_model
        model: str = self._own(role).get("model", named)
        return model

    @property
    def sharing(self) -> str:
        """What the workers on the target's GPU divide; empty if there is only the target."""
        if not self._on_one_gpu:
            return ""
        branches = self.draft_config.lookahead_branches
        ahead = f"drafts ahead for {branches} outcomes" if branches else "does not draft ahead"
        roles = self._sharers("target")
        shares = {role: self.worker_config(role).gpu_memory_utilization for role in roles}
        told = ", ".join(f"{role} {share or 'by its blocks'}" for role, share in shares.items())
        models = "both" if len(roles) == 2 else str(len(roles))
        return f"{models} models share a GPU (of its memory: {told}); the draft {ahead}"

    @property
    def _on_one_gpu(self) -> bool:
        """Whether drafts compute on the target's GPU."""
        return len(self._sharers("target")) > 1

    def _sharers(self, role: str) -> tuple[str, ...]:
        """All workers on this one's GPU; itself on a CPU."""
        return sharers(role, {each: self._device_of(each) for each in self.worker_roles})

    @property
    def _branches(self) -> int | None:
        """`lookahead_branches` of the draft worker; None means its default.

        On one GPU the passes of branches delay the target's.
        """
        shared = self._share_a_core or self._on_one_gpu
        return 0 if self.lookahead_branches is None and shared else self.lookahead_branches

    @property
    def _share_a_core(self) -> bool:
        """Whether both models share a core, or the CPU quota is below two cores.

        Work that one model does in advance then takes time from the other.
        """
        return self._cores_are_full and min(len(usable_cores()), core_quota()) < len(self.worker_roles)

    @property
    def _lookahead_limit(self) -> int | None:
        """`lookahead_sequences` of the draft worker; None means its default."""
        if self.lookahead_sequences is None and self._cores_are_full:
            return _FEW_SEQUENCES
        return self.lookahead_sequences

    @property
    def _cores_are_full(self) -> bool:
        """True if the models occupy all cores.

        The coordinator and the workers' sockets need another core: with more than a few sequences, drafting
        ahead costs the time it saves.
        """
        slow = all(on_cpu(self._device_of(role)) for role in self.worker_roles)
        return slow and _core_count() <= len(self.worker_roles)

    def coordinator_config(self, targets: tuple[str, ...], drafts: tuple[str, ...]) -> CoordinatorConfig:
        """The coordinator's configuration, once the workers' addresses are known."""
        values: dict[str, Any] = {name: getattr(self, name) for name in _COORDINATOR}
        values |= {"targets": targets, "drafts": drafts, "tokenizer": self.target_model}
        if self.drafts_per_sequence is None:
            values["drafts_per_sequence"] = max(1, len(self.draft_models))
        edge = {name: getattr(self, name) for name in ("tls_certificate", "tls_key")}
        if self.certificates and not any(edge.values()):
            edge = self._certificate_of("coordinator", "tls")
        values |= {**edge, "tls_ca": self.tls_ca, **self._certificate_of("coordinator", "worker_tls")}
        return _build(
            CoordinatorConfig, {**values, **self.coordinator, "exit_with_parent": True}, "coordinator"
        )

    @property
    def drain_seconds(self) -> float:
        """The coordinator's drain timeout, in seconds."""
        seconds: float = self.coordinator.get("drain_timeout", self.drain_timeout)
        return seconds

    def _certificate_of(self, role: str, prefix: str) -> dict[str, str]:
        """A process's files in the certificates folder; empty without a folder."""
        if not self.certificates:
            return {}
        names = {"certificate": f"{role}.pem", "key": f"{role}.key", "ca": "ca.pem"}
        return {f"{prefix}_{what}": str(Path(self.certificates) / name) for what, name in names.items()}


def _build(cls: type[_ConfigT], values: Mapping[str, Any], role: str) -> _ConfigT:
    known = {f.name for f in fields(cls)}
    for name in values:
        if name not in known:
            raise InvalidArgumentError(
                f"{role}.{name}", f"is unknown; known fields are {', '.join(sorted(known))}"
            )
    try:
        return cls(**values)
    except InvalidArgumentError as error:
        own = f"{role}_{error.field}"
        known_as = own if own in {f.name for f in fields(StackConfig)} else error.field
        raise InvalidArgumentError(known_as, error.description) from None


def _check_share(name: str, share: float) -> None:
    if not 0 < share <= 1:
        raise InvalidArgumentError(name, f"must be in (0, 1], got {share:g}")


def _core_count() -> int:
    """Number of usable cores, within the CPU quota."""
    return within_quota(len(usable_cores()))


def _threads(workers: int) -> int:
    """Threads per worker. Torch's threads spin while they wait, so workers must not share cores.

    A single worker leaves one core to the coordinator: on two cores, the embedded target decodes four times
    faster with one thread than with two.
    """
    cores = _core_count()
    return max(1, min(cores // workers, cores - 1))
