"""The sampling parameters of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Self

from paceline.core import limits
from paceline.core.structured import StructuredOutputs, structured_outputs
from paceline.core.validation import check_draw, from_mapping, integer, items, number, require


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class SamplingParams:
    """How to sample and what to report; names and meanings are vLLM's.

    `temperature` 0 is greedy. `top_k` 0 (or -1) and `top_p` 1 switch those filters off. `seed` None
    lets the server draw one and report it. `max_tokens` None means up to the model's length. For `logprobs`
    and `prompt_logprobs`, None reports nothing and 0 reports the tokens themselves only.
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
    """Strings that end the text. A single string is a list of one."""
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    bad_words: Sequence[str] = ()
    """Text that must not be generated. A single string is a list of one."""
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that may be generated."""
    n: int = 1
    """Number of completions of the prompt."""
    logprobs: int | None = None
    """Report the log-probability of each generated token and of this many most likely tokens."""
    prompt_logprobs: int | None = None
    """Report the log-probability of each prompt token and of this many most likely tokens."""
    echo: bool = False
    """Put the prompt in front of the text."""
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    """A format that the text must follow."""

    def __post_init__(self) -> None:
        """Normalise shorthand values. Raises InvalidArgumentError naming the field."""
        for name in ("stop", "bad_words"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            if getattr(self, name) is not None or name != "allowed_token_ids":
                object.__setattr__(self, name, items(name, getattr(self, name)))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "echo"):
            require(isinstance(getattr(self, name), bool), name, "must be true or false")
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        self._check_distribution()
        self._check_length()
        self._check_stop()
        self._check_masks()
        self._check_structure()
        self._check_reports()

    def _check_distribution(self) -> None:
        check_draw("", self.temperature, self.top_k, self.top_p)
        require(0 <= number("min_p", self.min_p) <= 1, "min_p", f"must be in [0, 1], got {self.min_p}")
        penalty = number("repetition_penalty", self.repetition_penalty)
        least, most = limits.MIN_REPETITION_PENALTY, limits.MAX_REPETITION_PENALTY
        require(
            least <= penalty <= most, "repetition_penalty", f"must be in [{least}, {most}], got {penalty}"
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = number(name, getattr(self, name))
            require(-2 <= value <= 2, name, f"must be in [-2, 2], got {value}")
        require(isinstance(self.logit_bias, Mapping), "logit_bias", "must map token ids to numbers")
        require(
            len(self.logit_bias) <= limits.MAX_LOGIT_BIAS_ENTRIES,
            "logit_bias",
            f"at most {limits.MAX_LOGIT_BIAS_ENTRIES} entries, got {len(self.logit_bias)}",
        )
        for token_id, bias in self.logit_bias.items():
            require(integer("logit_bias", token_id) >= 0, "logit_bias", f"token id {token_id} is negative")
            require(
                abs(number("logit_bias", bias)) <= limits.MAX_LOGIT_BIAS,
                "logit_bias",
                f"must be within ±{limits.MAX_LOGIT_BIAS}, got {bias}",
            )
        if self.seed is not None:
            require(0 <= integer("seed", self.seed) <= limits.MAX_SEED, "seed", "must be in [0, 2^64)")

    def _check_length(self) -> None:
        if self.max_tokens is not None:
            value = integer("max_tokens", self.max_tokens)
            require(
                1 <= value <= limits.MAX_TOKENS,
                "max_tokens",
                f"must be in [1, {limits.MAX_TOKENS}], got {value}",
            )
        value = integer("min_tokens", self.min_tokens)
        require(
            0 <= value <= limits.MAX_TOKENS, "min_tokens", f"must be in [0, {limits.MAX_TOKENS}], got {value}"
        )
        if self.max_tokens is not None:
            require(value <= self.max_tokens, "min_tokens", "must not be greater than max_tokens")

    def _check_stop(self) -> None:
        require(
            len(self.stop) <= limits.MAX_STOP_STRINGS, "stop", f"at most {limits.MAX_STOP_STRINGS} strings"
        )
        for text in self.stop:
            require(isinstance(text, str) and bool(text), "stop", "must be non-empty strings")
            require(
                len(text) <= limits.MAX_STOP_STRING_CHARACTERS,
                "stop",
                f"at most {limits.MAX_STOP_STRING_CHARACTERS} characters each",
            )
        require(
            len(self.stop_token_ids) <= limits.MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
            f"at most {limits.MAX_STOP_TOKEN_IDS} ids",
        )
        for token_id in self.stop_token_ids:
            require(integer("stop_token_ids", token_id) >= 0, "stop_token_ids", "must not be negative")

    def _check_masks(self) -> None:
        words, allowed = self.bad_words, self.allowed_token_ids
        require(len(words) <= limits.MAX_BAD_WORDS, "bad_words", f"at most {limits.MAX_BAD_WORDS} words")
        for word in words:
            require(isinstance(word, str) and bool(word), "bad_words", "must be non-empty strings")
            require(
                len(word) <= limits.MAX_BAD_WORD_CHARACTERS,
                "bad_words",
                f"at most {limits.MAX_BAD_WORD_CHARACTERS} characters each",
            )
        if allowed is None:
            return
        require(
            1 <= len(allowed) <= limits.MAX_ALLOWED_TOKEN_IDS,
            "allowed_token_ids",
            f"must be between 1 and {limits.MAX_ALLOWED_TOKEN_IDS} ids, got {len(allowed)}",
        )
        for token_id in allowed:
            require(integer("allowed_token_ids", token_id) >= 0, "allowed_token_ids", "must not be negative")

    def _check_structure(self) -> None:
        """Refuses combinations with a structure that could leave no token, or no way to end."""
        object.__setattr__(self, "structured_outputs", structured_outputs(self.structured_outputs))
        if self.structured_outputs is None:
            return
        message = "cannot be combined with structured_outputs"
        require(not self.ignore_eos, "ignore_eos", message)
        require(not self.bad_words, "bad_words", message)
        require(self.allowed_token_ids is None, "allowed_token_ids", message)

    @property
    def structure(self) -> StructuredOutputs | None:
        """`structured_outputs`, never as a dictionary."""
        assert not isinstance(self.structured_outputs, Mapping)
        return self.structured_outputs

    def _check_reports(self) -> None:
        require(
            1 <= integer("n", self.n) <= limits.MAX_N, "n", f"must be in [1, {limits.MAX_N}], got {self.n}"
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                require(
                    0 <= integer(name, value) <= limits.MAX_LOGPROBS,
                    name,
                    f"must be in [0, {limits.MAX_LOGPROBS}], got {value}",
                )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build from a dictionary. Raises InvalidArgumentError for an unknown name."""
        result: Self = from_mapping(cls, values)
        return result

    @property
    def greedy(self) -> bool:
        """True when every draw is an argmax."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """True when a penalty makes the distribution depend on earlier tokens."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def of_choice(self, choice: int) -> SamplingParams:
        """The parameters of one of the `n` completions as a separate request.

        Completion 0 equals the completion of `n` 1. The other completions use hashed seeds, so requests with
        neighbouring seeds share no completion. Only completion 0 reports the prompt.
        """
        if self.n == 1:
            return self
        if choice == 0:
            return self._with(n=1)
        assert self.seed is not None
        digest = blake2b(choice.to_bytes(8, "little"), digest_size=8, key=self.seed.to_bytes(8, "little"))
        return self._with(n=1, seed=int.from_bytes(digest.digest(), "little"), prompt_logprobs=None)

    def with_seed(self, seed: int) -> SamplingParams:
        """A copy with this seed, in [0, 2^64)."""
        return self._with(seed=seed)

    def without_prompt_report(self) -> SamplingParams:
        """A copy without `prompt_logprobs`, for a client that already has them."""
        return self._with(prompt_logprobs=None)

    def _with(self, **values: int | None) -> SamplingParams:
        """A copy with values known to be valid.

        The copy is not validated again: validation takes milliseconds for a list of 32,768 tokens, and a
        request may have hundreds of completions.
        """
        made = copy(self)
        for name, value in values.items():
            object.__setattr__(made, name, value)
        return made
