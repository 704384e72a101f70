"""Conversion of a user's arguments to protobuf messages. Raises InvalidArgumentError naming the field; no
I/O.

Refuses only values that the wire cannot carry; the server validates the rest.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.errors import InvalidArgumentError
from paceline.core.types import SamplingParams, SpeculationParams
from paceline.rpc import codec
from paceline.v1 import generation_pb2

Prompt = str | Sequence[int]
"""Text, or token ids."""
MAX_TIMEOUT = 1e9
"""Seconds. gRPC treats much longer deadlines as expired."""
Sampling = SamplingParams | Mapping[str, Any] | None
Speculation = SpeculationParams | Mapping[str, Any] | None


def token_ids_of(name: str, values: object) -> tuple[int, ...]:
    """Integers in [0, 2^32), of any integer type but bool. Raises InvalidArgumentError naming `name`."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes | bytearray | memoryview):
        raise InvalidArgumentError(name, f"must be a sequence of token ids, got {type(values).__name__}")
    ids: list[int] = []
    for position, value in enumerate(values):
        try:
            token_id = -1 if isinstance(value, bool) else operator.index(value)
        except TypeError:
            token_id = -1
        if not 0 <= token_id < 2**32:
            raise InvalidArgumentError(
                name, f"must contain integers in [0, 2^32); the value at position {position} is invalid"
            )
        ids.append(token_id)
    return tuple(ids)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidArgumentError(name, f"must be a string, got {type(value).__name__}")
    codec.check_text(name, value)
    return value


def _sampling(value: Sampling) -> SamplingParams:
    if value is None or isinstance(value, SamplingParams):
        return value or SamplingParams()
    if isinstance(value, Mapping):
        return SamplingParams.from_mapping(value)
    raise InvalidArgumentError("sampling", "must be SamplingParams or a dictionary")


def _speculation(value: Speculation) -> SpeculationParams:
    if value is None or isinstance(value, SpeculationParams):
        return value or SpeculationParams()
    if isinstance(value, Mapping):
        return SpeculationParams.from_mapping(value)
    raise InvalidArgumentError("speculation", "must be SpeculationParams or a dictionary")


def generate_request(
    prompt: Prompt,
    sampling: Sampling,
    speculation: Speculation,
    request_id: str | None,
    cache_salt: str | None = None,
) -> generation_pb2.GenerateRequest:
    """The message of a Generate call; None means the defaults of the parameter classes."""
    return codec.generate_request_to_proto(
        codec.GenerateCall(
            request_id="" if request_id is None else _text("request_id", request_id),
            prompt=prompt if isinstance(prompt, str) else token_ids_of("prompt", prompt),
            sampling=_sampling(sampling),
            speculation=_speculation(speculation),
            cache_salt="" if cache_salt is None else _text("cache_salt", cache_salt),
        )
    )


def tokenize_request(text: str) -> generation_pb2.TokenizeRequest:
    """The message of a Tokenize call; the text may be empty."""
    return generation_pb2.TokenizeRequest(text=_text("text", text))


def detokenize_request(token_ids: Sequence[int]) -> generation_pb2.DetokenizeRequest:
    """The message of a Detokenize call; the list may be empty."""
    return generation_pb2.DetokenizeRequest(token_ids=token_ids_of("token_ids", token_ids))


def checked_timeout(timeout: float | None) -> float | None:
    """Seconds until a deadline, or None for no deadline."""
    if timeout is None:
        return None
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not number or not 0 < timeout <= MAX_TIMEOUT:
        raise InvalidArgumentError(
            "timeout", f"must be in (0, {MAX_TIMEOUT:.0e}] seconds, or None for no deadline"
        )
    return timeout


def checked_resume_seconds(resume_seconds: float) -> float:
    """Seconds for which a broken stream is resumed; 0 disables resuming."""
    number = isinstance(resume_seconds, int | float) and not isinstance(resume_seconds, bool)
    if not number or not 0 <= resume_seconds <= MAX_TIMEOUT:
        raise InvalidArgumentError("resume_seconds", f"must be in [0, {MAX_TIMEOUT:.0e}] seconds")
    return resume_seconds
