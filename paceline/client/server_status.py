"""The server's models and the status of its processes, as values."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from google.protobuf.message import Message

from paceline.client.results import to_plain
from paceline.core.types import AcceptanceMode
from paceline.core.validation import AUTO, DraftTokens, TreeWidth
from paceline.rpc import codec
from paceline.v1 import common_pb2, generation_pb2

_T = TypeVar("_T")


class WorkerState(enum.Enum):
    """State of a worker as seen by the coordinator."""

    UNKNOWN = "unknown"
    """A state unknown to this version of the SDK."""
    CONNECTING = "connecting"
    READY = "ready"
    LOST = "lost"
    REFUSED = "refused"
    DRAINING = "draining"
    """Connected, but not usable; `reason` says why."""


_STATES: dict[int, WorkerState] = {
    generation_pb2.WORKER_STATE_CONNECTING: WorkerState.CONNECTING,
    generation_pb2.WORKER_STATE_READY: WorkerState.READY,
    generation_pb2.WORKER_STATE_LOST: WorkerState.LOST,
    generation_pb2.WORKER_STATE_REFUSED: WorkerState.REFUSED,
    generation_pb2.WORKER_STATE_DRAINING: WorkerState.DRAINING,
}


@dataclass(frozen=True, slots=True)
class Model:
    """A model that the server offers."""

    id: str
    max_model_len: int
    vocabulary_size: int


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """A worker's key-value cache, in blocks of `block_size` positions."""

    block_size: int
    total_blocks: int
    free_blocks: int
    """Free blocks, including cached ones."""
    sequences: int
    prefix_cache_queries: int
    """Tokens looked up in the prefix cache."""
    prefix_cache_hits: int
    """Tokens found in the prefix cache."""
    num_preemptions: int
    """Number of times a sequence lost its blocks to an older one."""
    cached_blocks: int
    """Free blocks with reusable entries."""


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """How a worker divides its GPU's memory, in bytes: planned when it was loaded."""

    total: int
    """The whole GPU's, that of other processes included."""
    weights: int
    cache: int
    recordings: int
    """The most that recorded passes take."""
    passes: int
    """The most that one pass and what follows it take: activations, logits, samples."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's latest report about itself."""

    protocol_version: int
    role: str
    model: str
    process_id: int
    instance_id: str
    vocabulary_size: int
    tokenizer_fingerprint: str
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    max_speculative_tokens: int
    cache: CacheInfo
    device: str
    dtype: str
    num_parameters: int
    local_socket: str
    """Path of the worker's additional Unix socket; empty without one."""
    weight_bytes: int
    """Bytes of weights read by one decode step."""
    memory: MemoryInfo | None = None
    """None without a GPU."""
    lookahead_branches: int = 0
    """Outcomes that a draft drafts ahead for; 0 waits for each verdict."""
    sub_drafter: str = ""
    """What guesses a draft's tokens; empty without."""
    model_fingerprint: str = ""
    """Distinguishes models by their weights; empty without any."""
    max_tree_nodes: int = 0
    """Nodes of the largest tree that it proposes or verifies; 0 for chains only."""
    drafter: str = ""
    """What a draft proposes with in place of `model`, whose tokenizer alone it has; empty with the model."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One configured worker as seen by the coordinator."""

    address: str
    role: str
    """`target` or `draft`."""
    state: WorkerState
    reason: str
    info: WorkerInfo | None
    """None if it never answered."""


@dataclass(frozen=True, slots=True)
class CoordinatorStatus:
    """The coordinator's own state and defaults."""

    address: str
    process_id: int
    running: int
    """Running completions; each of a request's `n` counts. The other counts are of completions too."""
    waiting: int
    num_speculative_tokens: DraftTokens
    max_num_speculative_tokens: int
    """Upper bound of K for `auto`."""
    acceptance_mode: AcceptanceMode | None
    """None if the server did not report it."""
    prompt_lookup: bool
    """Default of requests: whether draft tokens may be copied from a sequence's own text. Never with a fixed
    K in rejection or block mode above temperature 0, unless requested."""
    finished_requests: int
    """Since the coordinator started."""
    failed_requests: int
    http_address: str
    """Empty if HTTP is not served."""
    num_preemptions: int
    """Number of times a running sequence had to wait for blocks of the target's cache."""
    sources: tuple[str, ...] = ()
    """Context sources that may propose draft tokens for requests that do not name any."""
    warnings: tuple[str, ...] = ()
    """Settings that reduce drafting."""
    coordinators: tuple[str, ...] = ()
    """Addresses of all coordinators of this service, for a `Client` of them; empty where they are not
    known."""
    tree_width: TreeWidth = 1
    """Default of requests: most children of a node of a draft tree, or `auto`."""
    max_tree_nodes: int = 0
    drafts_per_sequence: int = 1
    serving: bool | None = None
    """False without a target worker, where new requests wait, and while it stops, where they are refused.
    None if the server did not report it."""


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The coordinator and all of its workers."""

    coordinator: CoordinatorStatus
    workers: tuple[WorkerStatus, ...]

    def to_dict(self) -> dict[str, Any]:
        """A dictionary for JSON."""
        plain: dict[str, Any] = to_plain(self)
        return plain


def mirror(cls: type[_T], message: Message, **given: Any) -> _T:
    """Build a dataclass from the message's fields of the same names, except those `given`."""
    values = dict(given)
    for f in fields(cls):  # type: ignore[arg-type]
        if f.name not in given:
            value = getattr(message, f.name)
            values[f.name] = value if isinstance(value, str | int | float) else tuple(value)
    return cls(**values)


def models_from_proto(response: generation_pb2.ListModelsResponse) -> tuple[Model, ...]:
    """The offered models."""
    return tuple(mirror(Model, model) for model in response.models)


def status_from_proto(response: generation_pb2.GetStatusResponse) -> ServerStatus:
    """Convert a status. States and modes of a newer server become unknown, since the status is for
    display."""
    mode = response.coordinator.acceptance_mode
    known = mode in common_pb2.AcceptanceMode.values() and mode != common_pb2.ACCEPTANCE_MODE_UNSPECIFIED
    return ServerStatus(
        coordinator=mirror(
            CoordinatorStatus,
            response.coordinator,
            num_speculative_tokens=AUTO
            if response.coordinator.auto_num_speculative_tokens
            else response.coordinator.num_speculative_tokens,
            acceptance_mode=codec.mode_from_proto(mode) if known else None,
            # A server without trees says nothing of them.
            tree_width=AUTO if response.coordinator.auto_tree_width else response.coordinator.tree_width or 1,
            drafts_per_sequence=response.coordinator.drafts_per_sequence or 1,
            serving=response.coordinator.serving if response.coordinator.HasField("serving") else None,
        ),
        workers=tuple(_worker(worker) for worker in response.workers),
    )


def _worker(message: generation_pb2.WorkerStatus) -> WorkerStatus:
    info = None
    if message.HasField("info"):
        memory = mirror(MemoryInfo, message.info.memory) if message.info.HasField("memory") else None
        info = mirror(WorkerInfo, message.info, cache=mirror(CacheInfo, message.info.cache), memory=memory)
    return mirror(WorkerStatus, message, state=_STATES.get(message.state, WorkerState.UNKNOWN), info=info)
