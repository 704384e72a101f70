"""The words of the system as values: what a request asks for, and what one round says.

All of them are frozen. The request types validate themselves and raise `InvalidArgumentError` with
the field's name, so a value that exists is a value that can be honoured.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from paceline.core.acceptance import GREEDY_MODE, AcceptanceMode
from paceline.core.sampling import SamplingParams
from paceline.core.structured import StructuredOutputs
from paceline.core.validation import DraftTokens, draft_tokens, from_mapping, require

__all__ = [
    "AcceptanceMode",
    "FinishReason",
    "Outcome",
    "Proposal",
    "SamplingParams",
    "SequenceParams",
    "SparseDistribution",
    "SpeculationParams",
    "StructuredOutputs",
    "Timings",
    "TokenLogprobs",
    "TokenOrigin",
    "Verdict",
]


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"


class TokenOrigin(enum.Enum):
    """How a committed token came about."""

    ACCEPTED = "accepted"
    """Drafted, and accepted by the target."""
    CORRECTION = "correction"
    """The target's token at the first rejected position."""
    BONUS = "bonus"
    """The target's token after a fully accepted proposal."""
    TARGET = "target"
    """Plain decoding: the round had no proposal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """How to speculate for one request.

    `num_speculative_tokens` is K; `auto` lets the server choose it for every round, up to a bound of its
    own, and 0 switches drafting off. None takes the server's setting. `acceptance` None takes the
    server's default mode. `prompt_lookup` allows or forbids draft tokens that are copied from the sequence's
    own text, within the same K; None takes the server's setting, but off with a fixed K in rejection or block
    mode above temperature 0: what is copied follows from measured times, and a seed's tokens would too.
    """

    num_speculative_tokens: DraftTokens | None = None
    acceptance: AcceptanceMode | str | None = None
    prompt_lookup: bool | None = None

    def __post_init__(self) -> None:
        """Accept the mode by name, refuse K outside the bound."""
        if self.num_speculative_tokens is not None:
            draft_tokens("num_speculative_tokens", self.num_speculative_tokens)
        if isinstance(self.acceptance, str):
            names = [mode.value for mode in AcceptanceMode]
            require(self.acceptance in names, "acceptance", f"must be one of {', '.join(names)}")
            object.__setattr__(self, "acceptance", AcceptanceMode(self.acceptance))
        known = self.acceptance is None or isinstance(self.acceptance, AcceptanceMode)
        require(known, "acceptance", "must be an acceptance mode or its name")
        truth = self.prompt_lookup is None or isinstance(self.prompt_lookup, bool)
        require(truth, "prompt_lookup", "must be true or false")

    @property
    def mode(self) -> AcceptanceMode | None:
        """The acceptance mode, or None for the server's default."""
        assert not isinstance(self.acceptance, str)
        return self.acceptance

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build from a dictionary; an unknown name is refused, not ignored."""
        result: Self = from_mapping(cls, values)
        return result


@dataclass(frozen=True, slots=True)
class SequenceParams:
    """What a worker keeps of a request: how to sample, how to accept, where the prompt ends."""

    sampling: SamplingParams
    mode: AcceptanceMode
    prompt_length: int
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """`sampling.bad_words` as the target's tokenizer has them: no sequence of these may be completed."""
    cache_salt: str = ""
    """Cached prefixes are shared among sequences with the same salt only."""
    traceparent: str = ""
    """W3C trace context of the request's span; empty where the request is not traced."""

    @property
    def judged_as(self) -> AcceptanceMode:
        """The mode whose rule judges this request."""
        return GREEDY_MODE if self.sampling.greedy else self.mode

    @property
    def target_decides(self) -> bool:
        """True when every token is the target's own choice: with shared noise, and in every mode at
        temperature 0."""
        return self.judged_as.facts.shares_noise


@dataclass(frozen=True, slots=True)
class SparseDistribution:
    """The whole support one draft token was drawn from; a full q is never sent.

    `token_ids` are little-endian uint32 and `probabilities` little-endian float32, as on the wire, so
    that passing one on copies nothing. Both sides normalise the same float32 values in float64.
    """

    token_ids: bytes
    probabilities: bytes

    def __len__(self) -> int:
        return len(self.token_ids) // 4


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens as a tree in topological order.

    `parents` is empty for a chain; else one entry a node, the index of its parent or -1 for the root.
    `distributions` is empty when nodes need none (coupled mode, deterministic drafter), else one a node.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    distributions: tuple[SparseDistribution, ...] = ()

    @property
    def num_draft_tokens(self) -> int:
        """K for a chain; nodes for a tree."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Timings:
    """Where one answer's time went, in seconds, as measured by the worker that gives it."""

    queue: float = 0.0
    """Between the command's arrival and the first pass it was part of."""
    compute: float = 0.0
    """Passes the command was part of, sampling and acceptance included."""
    rows: int = 0
    """Rows of all sequences in the last of those passes."""
    sequences: int = 0
    """Sequences in the last of those passes; one, of no rows, where draft tokens were judged without any."""
    prefill: float = 0.0
    """By rows, what feeding this sequence's tokens took whose logits nobody wanted: those of a prompt, or of
    what the worker had missed. Part of `compute`, but for what a draft read before it was asked."""
    prefill_rows: int = 0
    """Such rows of all sequences in the last of those passes."""
    prefill_rows_before: int = 0
    """Such rows for which a round waited until its first pass: of the pass that ran when it arrived, by how
    much of that was still to come. A target tells it."""
    cached_tokens: int = 0
    """Entries of this sequence that came from the prefix cache."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the target's own distribution: before any transform.

    `top_token_ids` are the likeliest tokens, best first, as many as were asked for; the token itself need
    not be among them.
    """

    token_id: int
    logprob: float
    rank: int
    """1 + the number of tokens that are likelier."""
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class Outcome(NamedTuple):
    """How a round ends, as far as the next one depends on it."""

    num_accepted: int
    next_token: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's answer to one round: the accepted draft tokens and the next token."""

    num_accepted: int
    token_ids: tuple[int, ...]
    """Accepted tokens, then the correction or bonus: num_accepted + 1 ids. Where a grammar gives up behind an
    accepted draft token, that one is the last."""
    num_computed_tokens: int
    """Entries in the target's cache after it truncated: always ledger length - 1."""
    timings: Timings = field(default_factory=Timings)
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One each of `token_ids` where the request asks for them."""
    went_on_with: int | None = None
    """The next round has begun, with so many tokens of the proposal a VerifyAhead gave for this outcome, or
    with none where it gave none; None: it has not begun."""

    @property
    def outcome(self) -> Outcome:
        """By which the next round was told ahead."""
        return Outcome(self.num_accepted, self.token_ids[-1])
