"""What a client gets back: chunks while tokens arrive, and the result when they are all there."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

from paceline.core.types import AcceptanceMode, TokenOrigin


def to_plain(value: Any) -> Any:
    """A tree of dataclasses as what `json.dumps` takes: dictionaries, lists, enum values."""
    if is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    return value


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class SpeculativeDecoding:
    """What speculation did for one request, named as in vLLM's per-request block."""

    mean_acceptance_length: float
    """1 + accepted / rounds with a proposal."""
    draft_acceptance_rate: float
    """Accepted / drafted."""
    acceptance_histogram: tuple[int, ...]
    """Entry i: rounds with a proposal in which exactly i draft tokens were accepted."""
    num_spec_steps: int
    """Rounds with a proposal."""
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    acceptance_rate_per_position: tuple[float, ...]
    """Entry i: share of the proposals that reach position i whose draft token there was accepted."""
    num_rounds: int
    """All rounds, those of plain decoding included."""
    num_lookahead_hits: int
    """Rounds whose proposal was there before they began."""


@dataclass(frozen=True, slots=True)
class RoundTimings:
    """Sums over all rounds of one request, in seconds."""

    draft: float
    target: float
    queue: float
    """In worker queues."""
    wire: float
    """Between the processes: serialisation, transport, event loops."""
    coordinator: float
    total: float


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """One finished generation."""

    request_id: str
    seed: int
    """The one that was used: with it the same request gives the same tokens again."""
    acceptance: AcceptanceMode
    text: str
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    """How each token came about, one each."""
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    """The stop string or the stop token's id that ended it; None for end-of-sequence and length."""
    usage: Usage
    speculative_decoding: SpeculativeDecoding
    timings: RoundTimings

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        plain: dict[str, Any] = to_plain(self)
        return plain


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """The tokens one round committed. The concatenated texts of all chunks are the result's text.

    Text may lag behind the tokens: it never ends inside a character or a possible stop string. What was
    held back comes with the last chunk, which has no tokens but a `finish_reason` and the `result`.
    """

    index: int
    """Of the first of `token_ids` among the generated tokens."""
    token_ids: tuple[int, ...]
    text: str
    origins: tuple[TokenOrigin, ...]
    finish_reason: Literal["stop", "length"] | None = None
    result: GenerationResult | None = None
