"""The words of the system as values: what a request asks for, and what one round says.

All of them are frozen. The request types validate themselves and raise `InvalidArgumentError` with
the field's name, so a value that exists is a value that can be honoured.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

from paceline.core import limits
from paceline.core.errors import InvalidArgumentError


class AcceptanceMode(enum.Enum):
    """How the target decides on draft tokens; each one leaves the target's distribution unchanged."""

    COUPLED = "coupled"
    REJECTION = "rejection"
    BLOCK = "block"


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


def _require(condition: bool, name: str, message: str) -> None:
    if not condition:
        raise InvalidArgumentError(name, message)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgumentError(name, f"must be a number, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    _require(math.isfinite(number), name, "must be finite")
    return number


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgumentError(name, f"must be an integer, got {type(value).__name__}")
    return value


def _items(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidArgumentError(name, f"must be a list, got {type(value).__name__}")
    return tuple(value)


def _from_mapping(cls: type[Any], values: Mapping[str, Any]) -> Any:
    known = {f.name for f in fields(cls)}
    for name in values:
        _require(name in known, name, f"unknown parameter; known are {', '.join(sorted(known))}")
    return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What to sample, with the names and meanings vLLM users know.

    `temperature` 0 is greedy. `top_k` 0 (or -1) and `top_p` 1 switch those filters off. `seed` None
    lets the server draw one and report it. `max_tokens` None means up to the model's length.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Sequence[str] = ()
    """Strings that end the text; one string stands for itself."""
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        """Normalise the convenient spellings, then refuse what cannot be honoured."""
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, _items(name, getattr(self, name)))
        for name in ("ignore_eos", "include_stop_str_in_output"):
            _require(isinstance(getattr(self, name), bool), name, "must be true or false")
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        self._check_distribution()
        self._check_length()
        self._check_stop()

    def _check_distribution(self) -> None:
        temperature = _number("temperature", self.temperature)
        _require(
            temperature == 0 or limits.MIN_TEMPERATURE <= temperature <= limits.MAX_TEMPERATURE,
            "temperature",
            f"must be 0 or in [{limits.MIN_TEMPERATURE}, {limits.MAX_TEMPERATURE}], got {temperature}",
        )
        _require(0 < _number("top_p", self.top_p) <= 1, "top_p", f"must be in (0, 1], got {self.top_p}")
        _require(_integer("top_k", self.top_k) >= 0, "top_k", f"must be at least 0, got {self.top_k}")
        _require(0 <= _number("min_p", self.min_p) <= 1, "min_p", f"must be in [0, 1], got {self.min_p}")
        penalty = _number("repetition_penalty", self.repetition_penalty)
        _require(0 < penalty <= 100, "repetition_penalty", f"must be in (0, 100], got {penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            value = _number(name, getattr(self, name))
            _require(-2 <= value <= 2, name, f"must be in [-2, 2], got {value}")
        _require(isinstance(self.logit_bias, Mapping), "logit_bias", "must map token ids to numbers")
        _require(
            len(self.logit_bias) <= limits.MAX_LOGIT_BIAS_ENTRIES,
            "logit_bias",
            f"at most {limits.MAX_LOGIT_BIAS_ENTRIES} entries, got {len(self.logit_bias)}",
        )
        for token_id, bias in self.logit_bias.items():
            _require(_integer("logit_bias", token_id) >= 0, "logit_bias", f"token id {token_id} is negative")
            _require(
                abs(_number("logit_bias", bias)) <= limits.MAX_LOGIT_BIAS,
                "logit_bias",
                f"must be within ±{limits.MAX_LOGIT_BIAS}, got {bias}",
            )
        if self.seed is not None:
            _require(0 <= _integer("seed", self.seed) <= limits.MAX_SEED, "seed", "must be in [0, 2^64)")

    def _check_length(self) -> None:
        if self.max_tokens is not None:
            value = _integer("max_tokens", self.max_tokens)
            _require(
                1 <= value <= limits.MAX_TOKENS,
                "max_tokens",
                f"must be in [1, {limits.MAX_TOKENS}], got {value}",
            )
        value = _integer("min_tokens", self.min_tokens)
        _require(
            0 <= value <= limits.MAX_TOKENS, "min_tokens", f"must be in [0, {limits.MAX_TOKENS}], got {value}"
        )
        if self.max_tokens is not None:
            _require(value <= self.max_tokens, "min_tokens", "must not be greater than max_tokens")

    def _check_stop(self) -> None:
        _require(
            len(self.stop) <= limits.MAX_STOP_STRINGS, "stop", f"at most {limits.MAX_STOP_STRINGS} strings"
        )
        for text in self.stop:
            _require(isinstance(text, str) and bool(text), "stop", "must be non-empty strings")
            _require(
                len(text) <= limits.MAX_STOP_STRING_CHARACTERS,
                "stop",
                f"at most {limits.MAX_STOP_STRING_CHARACTERS} characters each",
            )
        _require(
            len(self.stop_token_ids) <= limits.MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
            f"at most {limits.MAX_STOP_TOKEN_IDS} ids",
        )
        for token_id in self.stop_token_ids:
            _require(_integer("stop_token_ids", token_id) >= 0, "stop_token_ids", "must not be negative")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build from a dictionary; an unknown name is refused, not ignored."""
        result: Self = _from_mapping(cls, values)
        return result

    @property
    def greedy(self) -> bool:
        """True when every draw is an argmax."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """True when the distribution depends on which tokens came before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """How to speculate for one request.

    `num_speculative_tokens` None takes the server's setting; 0 switches drafting off. `acceptance`
    None takes the server's default mode.
    """

    num_speculative_tokens: int | None = None
    acceptance: AcceptanceMode | str | None = None

    def __post_init__(self) -> None:
        """Accept the mode by name, refuse K outside the bound."""
        if self.num_speculative_tokens is not None:
            k = _integer("num_speculative_tokens", self.num_speculative_tokens)
            _require(
                0 <= k <= limits.MAX_SPECULATIVE_TOKENS,
                "num_speculative_tokens",
                f"must be between 0 and {limits.MAX_SPECULATIVE_TOKENS}, got {k}",
            )
        if isinstance(self.acceptance, str):
            names = [mode.value for mode in AcceptanceMode]
            _require(self.acceptance in names, "acceptance", f"must be one of {', '.join(names)}")
            object.__setattr__(self, "acceptance", AcceptanceMode(self.acceptance))
        known = self.acceptance is None or isinstance(self.acceptance, AcceptanceMode)
        _require(known, "acceptance", "must be an acceptance mode or its name")

    @property
    def mode(self) -> AcceptanceMode | None:
        """The acceptance mode, or None for the server's default."""
        assert not isinstance(self.acceptance, str)
        return self.acceptance

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build from a dictionary; an unknown name is refused, not ignored."""
        result: Self = _from_mapping(cls, values)
        return result


@dataclass(frozen=True, slots=True)
class SequenceParams:
    """What a worker keeps of a request: how to sample, how to accept, where the prompt ends."""

    sampling: SamplingParams
    mode: AcceptanceMode
    prompt_length: int


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
    """Sequences in the last of those passes."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's answer to one round: the accepted draft tokens and the next token."""

    num_accepted: int
    token_ids: tuple[int, ...]
    """Accepted tokens, then the correction or bonus: num_accepted + 1 ids."""
    num_computed_tokens: int
    """Entries in the target's cache after it truncated: always ledger length - 1."""
    timings: Timings = field(default_factory=Timings)
