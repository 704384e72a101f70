"""Speculative decoding across machines: a draft worker proposes tokens, a target worker verifies them.

    from paceline import Client, SamplingParams, SpeculationParams

Public names are loaded on first use, so that importing a submodule does not load the whole package.
"""

from __future__ import annotations

TYPE_CHECKING = False
"""Type checkers treat it as true. Defined here because importing `typing` takes time."""
if TYPE_CHECKING:
    from typing import Any

    from paceline.client import (
        AcceptanceMode,
        AlreadyExistsError,
        AsyncClient,
        CancelledError,
        Client,
        DeadlineExceededError,
        FailedPreconditionError,
        GenerationChunk,
        GenerationResult,
        InternalError,
        InvalidArgumentError,
        NotFoundError,
        PacelineError,
        PermissionDeniedError,
        ResourceExhaustedError,
        SamplingParams,
        SpeculationParams,
        StaleEpochError,
        StructuredOutputs,
        Tls,
        TokenizerMismatchError,
        TokenOrigin,
        UnauthenticatedError,
        UnavailableError,
    )
    from paceline.core import errors

    __version__: str

__all__ = [
    "AcceptanceMode",
    "AlreadyExistsError",
    "AsyncClient",
    "CancelledError",
    "Client",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "GenerationChunk",
    "GenerationResult",
    "InternalError",
    "InvalidArgumentError",
    "NotFoundError",
    "PacelineError",
    "PermissionDeniedError",
    "ResourceExhaustedError",
    "SamplingParams",
    "SpeculationParams",
    "StaleEpochError",
    "StructuredOutputs",
    "Tls",
    "TokenOrigin",
    "TokenizerMismatchError",
    "UnauthenticatedError",
    "UnavailableError",
    "__version__",
    "errors",
]


def __getattr__(name: str) -> Any:
    """Load a public name. Raises AttributeError for any other."""
    from importlib import import_module, metadata

    value: Any
    if name == "__version__":
        value = metadata.version("paceline")
    elif name == "errors":
        value = import_module("paceline.core.errors")
    elif name in __all__:
        value = getattr(import_module("paceline.client"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted({*globals(), *__all__})
