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
    cached_prompt_tokens: int = 0
    """Tokens of the prompt whose entries the target had in its prefix cache, for the first completion."""


@dataclass(frozen=True, slots=True)
class SpeculativeDecoding:
    """What speculation did for one completion, named as in vLLM's per-request block.

    Of a stream that was resumed at a server that did not hold the request (any more), it is of the rest.
    """

    mean_acceptance_length: float
    """Committed tokens of a round with a proposal; 1 without any."""
    draft_acceptance_rate: float
    """Accepted / drafted; draft tokens behind the end of the output count as drafted."""
    acceptance_histogram: tuple[int, ...]
    """Entry i: rounds with a proposal in which exactly i draft tokens were accepted and committed."""
    num_spec_steps: int
    """Rounds with a proposal."""
    num_draft_tokens: int
    """Draft tokens that were verified, those behind the end of the output included."""
    num_accepted_draft_tokens: int
    """Those that were committed: the tokens of origin `accepted`."""
    acceptance_rate_per_position: tuple[float, ...]
    """Entry i: of the draft tokens at position i that were accepted or replaced, the share accepted."""
    num_rounds: int
    """All rounds, those of plain decoding included."""
    num_lookahead_hits: int
    """Rounds whose proposal was there before they began."""
    num_prompt_lookups: int
    """Rounds whose proposal was copied from the sequence's own text."""


@dataclass(frozen=True, slots=True)
class RoundTimings:
    """Sums over all rounds of one completion, in seconds.

    Of a stream that was resumed at a server that did not hold the request (any more), they are of the rest.
    """

    draft: float
    target: float
    queue: float
    """In worker queues."""
    wire: float
    """Between the processes: serialisation, transport, event loops."""
    coordinator: float
    total: float


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token at one position, by the target's own distribution: before penalties, filters and so on."""

    logprob: float
    rank: int
    """1 + the number of tokens that are likelier."""
    decoded_token: str
    """Its text alone; bytes that are no whole character show as U+FFFD."""


PositionLogprobs = Mapping[int, Logprob]
"""By token id: the token that is there, then the likeliest ones, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One of the `n` completions of a request."""

    choice: int = 0
    seed: int
    """The one that was used: in coupled mode and at temperature 0 the same request with it and with `n` 1
    gives the same tokens again."""
    text: str
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    """How each token came about, one each."""
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    """The stop string or the stop token's id that ended it; None for end-of-sequence and length."""
    logprobs: tuple[PositionLogprobs, ...] | None = None
    """One each token; None unless asked for."""
    speculative_decoding: SpeculativeDecoding
    timings: RoundTimings

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum over the tokens; None unless `logprobs` were asked for."""
        if self.logprobs is None:
            return None
        pairs = zip(self.token_ids, self.logprobs, strict=True)
        return sum(position[token_id].logprob for token_id, position in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult(CompletionOutput):
    """A finished request: its first completion, and all of them in `outputs`.

    So `speculative_decoding` and `timings` are of the first one alone.
    """

    request_id: str
    acceptance: AcceptanceMode
    usage: Usage
    """Of all completions; the prompt counts once."""
    prompt_token_ids: tuple[int, ...] | None = None
    """None unless `echo` or `prompt_logprobs` were asked for."""
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    """One each token of the prompt, None for the first, which nothing precedes; None unless asked for."""
    outputs: tuple[CompletionOutput, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON. With one completion `outputs` is left out: it would say everything twice."""
        plain: dict[str, Any] = to_plain(self)
        for output, shown in zip((self, *self.outputs), (plain, *plain["outputs"]), strict=True):
            shown["cumulative_logprob"] = output.cumulative_logprob
        if len(self.outputs) == 1:
            del plain["outputs"]
        return plain


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """The tokens one round committed. The concatenated texts of a choice's chunks are its text.

    After a stream broke, what was missed comes in chunks of up to 256 tokens, of however many rounds. Text
    may lag behind the tokens: it never ends inside a character or a possible stop string. What was held back
    comes with the choice's last tokens at the latest. Behind them its last chunk has no tokens, but a
    `finish_reason`; the last one of all has the `result`. Others without tokens tell of the prompt: what
    `echo` and `prompt_logprobs` ask for.
    """

    index: int
    """Of the first of `token_ids` among the choice's generated tokens."""
    token_ids: tuple[int, ...]
    text: str
    origins: tuple[TokenOrigin, ...]
    finish_reason: Literal["stop", "length"] | None = None
    result: GenerationResult | None = None
    choice: int = 0
    """Which of the `n` completions."""
    logprobs: tuple[PositionLogprobs, ...] = ()
    """One each token, if asked for."""
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    """Of the next tokens of the prompt, beginning with its second one."""
