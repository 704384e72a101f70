"""The SDK: `Client` and `AsyncClient`, and everything they take, return and raise."""

from __future__ import annotations

from paceline.client.async_client import AsyncClient, AsyncGenerationStream
from paceline.client.results import (
    CompletionOutput,
    GenerationChunk,
    GenerationResult,
    Logprob,
    RoundTimings,
    SpeculativeDecoding,
    Usage,
)
from paceline.client.server_status import (
    CacheInfo,
    CoordinatorStatus,
    Model,
    ServerStatus,
    WorkerInfo,
    WorkerState,
    WorkerStatus,
)
from paceline.client.sync_client import Client, GenerationStream
from paceline.core.errors import (
    AlreadyExistsError,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PacelineError,
    ResourceExhaustedError,
    StaleEpochError,
    TokenizerMismatchError,
    UnavailableError,
)
from paceline.core.types import AcceptanceMode, SamplingParams, SpeculationParams, TokenOrigin

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
    "Model",
    "NotFoundError",
    "PacelineError",
    "ResourceExhaustedError",
    "RoundTimings",
    "SamplingParams",
    "ServerStatus",
    "SpeculationParams",
    "SpeculativeDecoding",
    "StaleEpochError",
    "TokenOrigin",
    "TokenizerMismatchError",
    "UnavailableError",
    "Usage",
    "WorkerInfo",
    "WorkerState",
    "WorkerStatus",
]
