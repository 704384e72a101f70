"""The SDK: `Client`, `AsyncClient`, and the types that they take, return and raise."""

from __future__ import annotations

from paceline.client.async_client import AsyncClient
from paceline.client.async_stream import AsyncGenerationStream
from paceline.client.results import (
    CompletionOutput,
    GenerationChunk,
    GenerationResult,
    Logprob,
    RoundTimings,
    SourceCounts,
    SpeculativeDecoding,
    Usage,
)
from paceline.client.server_status import (
    CacheInfo,
    CoordinatorStatus,
    MemoryInfo,
    Model,
    ServerStatus,
    WorkerInfo,
    WorkerState,
    WorkerStatus,
)
from paceline.client.sync_client import Client
from paceline.client.sync_stream import GenerationStream
from paceline.core.errors import (
    AlreadyExistsError,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PacelineError,
    PermissionDeniedError,
    ResourceExhaustedError,
    StaleEpochError,
    TokenizerMismatchError,
    UnauthenticatedError,
    UnavailableError,
)
from paceline.core.security.tls import Tls
from paceline.core.types import (
    AcceptanceMode,
    SamplingParams,
    SpeculationParams,
    StructuredOutputs,
    TokenOrigin,
)

__all__ = [
    "AcceptanceMode",
    "AlreadyExistsError",
    "AsyncClient",
    "AsyncGenerationStream",
    "CacheInfo",
    "CancelledError",
    "Client",
    "CompletionOutput",
    "CoordinatorStatus",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "GenerationChunk",
    "GenerationResult",
    "GenerationStream",
    "InternalError",
    "InvalidArgumentError",
    "Logprob",
    "MemoryInfo",
    "Model",
    "NotFoundError",
    "PacelineError",
    "PermissionDeniedError",
    "ResourceExhaustedError",
    "RoundTimings",
    "SamplingParams",
    "ServerStatus",
    "SourceCounts",
    "SpeculationParams",
    "SpeculativeDecoding",
    "StaleEpochError",
    "StructuredOutputs",
    "Tls",
    "TokenOrigin",
    "TokenizerMismatchError",
    "UnauthenticatedError",
    "UnavailableError",
    "Usage",
    "WorkerInfo",
    "WorkerState",
    "WorkerStatus",
]
