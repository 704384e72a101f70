"""Return types of the clients: chunks of a stream, and the complete result."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

from paceline.core.types import AcceptanceMode, TokenOrigin


def to_plain(value: Any) -> Any:
    """Convert nested dataclasses and enums to values for `json.dumps`."""
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
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_prompt_tokens: int = 0
    """Prompt tokens found in the target's prefix cache, for the first completion."""


@dataclass(frozen=True, slots=True)
class SourceCounts:
    """What one source of draft tokens proposed."""

    source: str
    """`draft` for the draft worker, or a context source such as `prompt-lookup`."""
    num_rounds: int
    """Rounds with its proposal."""
    num_draft_tokens: int
    num_accepted_draft_tokens: int


@dataclass(frozen=True, slots=True)
class SpeculativeDecoding:
    """Speculation statistics of one completion, named as in vLLM's per-request block.

    If a stream was resumed on a server that no longer held the request, only the resumed part is counted.
    """

    mean_acceptance_length: float
    """Mean number of committed tokens per round with a proposal; 1 without such rounds."""
    draft_acceptance_rate: float
    """Accepted / drafted; draft tokens beyond the end of the output count as drafted."""
    acceptance_histogram: tuple[int, ...]
    """Entry i: number of rounds with a proposal in which exactly i draft tokens were accepted and
    committed."""
    num_spec_steps: int
    """Rounds with a proposal."""
    num_draft_tokens: int
    """Verified draft tokens, or nodes of trees, including those beyond the end of the output."""
    num_accepted_draft_tokens: int
    """Committed draft tokens: the tokens of origin `accepted`."""
    acceptance_rate_per_position: tuple[float, ...]
    """Entry i: accepted share of the draft tokens at position i that were judged."""
    num_rounds: int
    """All rounds, including plain decoding."""
    num_lookahead_hits: int
    """Rounds whose proposal was drafted in advance."""
    num_prompt_lookups: int
    """Rounds whose proposal was copied from the sequence's own text."""
    by_source: tuple[SourceCounts, ...] = ()
    """Sources that proposed at least once."""
    accepted_per_rank: tuple[int, ...] = ()
    """Entry i: committed draft tokens that were child i of their node, best first; a chain has entry 0
    only."""


@dataclass(frozen=True, slots=True)
class RoundTimings:
    """Sums over all rounds of one completion, in seconds.

    If a stream was resumed on a server that no longer held the request, only the resumed part is counted.
    """

    draft: float
    target: float
    queue: float
    """Time in worker queues."""
    wire: float
    """Time between processes: serialisation, transport, event loops."""
    coordinator: float
    total: float


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token at one position under the target's distribution, before temperature and filters."""

    logprob: float
    rank: int
    """1 + the number of more likely tokens."""
    decoded_token: str
    """Text of this token alone; incomplete characters appear as U+FFFD."""


PositionLogprobs = Mapping[int, Logprob]
"""Keyed by token id: the token at the position, then the most likely ones, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One of the `n` completions of a request."""

    choice: int = 0
    seed: int
    """The seed used. In coupled mode and at temperature 0, the same request with this seed and `n` 1
    reproduces the tokens."""
    text: str
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    """Origin of each token."""
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    """The stop string or stop token id that ended the output; None for end-of-sequence and length."""
    logprobs: tuple[PositionLogprobs, ...] | None = None
    """One entry per token; None unless requested."""
    speculative_decoding: SpeculativeDecoding
    timings: RoundTimings

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the tokens' log-probabilities; None unless `logprobs` were requested."""
        if self.logprobs is None:
            return None
        pairs = zip(self.token_ids, self.logprobs, strict=True)
        return sum(position[token_id].logprob for token_id, position in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult(CompletionOutput):
    """A finished request: the fields of its first completion, and all completions in `outputs`.

    `speculative_decoding` and `timings` thus cover the first completion only.
    """

    request_id: str
    acceptance: AcceptanceMode
    usage: Usage
    """Totals of all completions; the prompt counts once."""
    prompt_token_ids: tuple[int, ...] | None = None
    """None unless `echo` or `prompt_logprobs` were requested."""
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    """One entry per prompt token, None for the first token; None unless requested."""
    outputs: tuple[CompletionOutput, ...]

    def to_dict(self) -> dict[str, Any]:
        """A dictionary for JSON, without `outputs` for a single completion, whose fields it has already."""
        plain: dict[str, Any] = to_plain(self)
        for output, shown in zip((self, *self.outputs), (plain, *plain["outputs"]), strict=True):
            shown["cumulative_logprob"] = output.cumulative_logprob
        if len(self.outputs) == 1:
            del plain["outputs"]
        return plain


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """The tokens committed by one round. A choice's text is the concatenation of its chunks' texts.

    After a broken stream, missed tokens arrive in chunks of up to 256 tokens from several rounds. Text may
    lag behind the tokens, because it never ends inside a character or a possible stop string; the rest
    arrives with the choice's last tokens at the latest. The last chunk of a choice has no tokens but a
    `finish_reason`, and the last chunk of the stream has the `result`. Other chunks without tokens carry the
    prompt's text and log-probabilities (`echo`, `prompt_logprobs`).
    """

    index: int
    """Index of the first of `token_ids` among the choice's generated tokens."""
    token_ids: tuple[int, ...]
    text: str
    origins: tuple[TokenOrigin, ...]
    finish_reason: Literal["stop", "length"] | None = None
    result: GenerationResult | None = None
    choice: int = 0
    """Index of the completion, below `n`."""
    logprobs: tuple[PositionLogprobs, ...] = ()
    """One entry per token, if requested."""
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    """Entries of the next prompt tokens, starting with the second token."""
