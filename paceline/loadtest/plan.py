"""The requests of a load test and their times: a pure function of the settings."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice, repeat

from paceline.core import limits
from paceline.core.types import SamplingParams
from paceline.core.validation import require
from paceline.loadtest.config import LoadConfig
from paceline.loadtest.prompts import PromptLine, Prompts


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    number: int
    due: float | None
    """Seconds after the start; None means as soon as a slot is free."""
    prompt: str | tuple[int, ...]
    sampling: SamplingParams


def arrivals(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds from the start at which requests are due, `rate` per second on average.

    The gaps are gamma-distributed with shape `burstiness`; their coefficient of variation is 1/√burstiness.
    Shape 1 is exponential, so the arrivals are a Poisson process.
    """
    chosen = random.Random(seed)
    due = 0.0
    while True:
        due += chosen.gammavariate(burstiness, 1 / (rate * burstiness))
        yield due


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """All requests of a test. The same settings give the same requests."""

    config: LoadConfig
    prompts: Prompts
    sampling: SamplingParams
    """Parameters of every request except the seed; seeds count up from this one, or from 0."""
    vocabulary_size: int
    """Range of the token ids of random prompts."""

    def __iter__(self) -> Iterator[Ask]:
        """The requests in the order they are sent."""
        config = self.config
        due: Iterator[float | None] = repeat(None)
        if config.rate is not None:
            due = arrivals(config.rate, config.burstiness, self.sampling.seed or 0)
        for number, when in zip(islice(count(), config.most_requests), due, strict=False):
            if when is not None and config.duration is not None and when >= config.duration:
                return
            yield self.ask(number, when)

    def ask(self, number: int, due: float | None = None) -> Ask:
        """The request with this number. Prompts take turns."""
        seed = ((self.sampling.seed or 0) + number) % (limits.MAX_SEED + 1)
        chosen = random.Random(seed)
        line = self._random_prompt(chosen) or self.prompts[number % len(self.prompts)]
        tokens = line.max_tokens
        if tokens is None and self.sampling.max_tokens is not None:
            tokens = self._spread(chosen, self.sampling.max_tokens)  # within the bounds of check_lengths
        return Ask(number, due, line.prompt, replace(self.sampling, seed=seed, max_tokens=tokens))

    def _random_prompt(self, chosen: random.Random) -> PromptLine | None:
        if self.config.prompt_tokens is None:
            return None
        length = self._spread(chosen, self.config.prompt_tokens)
        return PromptLine(tuple(chosen.randrange(self.vocabulary_size) for _ in range(length)))

    def _spread(self, chosen: random.Random, tokens: int) -> int:
        """A random number around `tokens`, by `length_spread`."""
        spread = self.config.length_spread
        return _times(tokens, chosen.uniform(1 - spread, 1 + spread)) if spread else tokens


def _times(tokens: int, factor: float) -> int:
    return max(1, round(tokens * factor))


def check_lengths(config: LoadConfig, prompts: Prompts, sampling: SamplingParams) -> None:
    """Refuse lengths that are invalid for some request of a plan. Requests are built while the test runs, so
    an invalid one would end it. Raises InvalidArgumentError naming the field."""
    least = sampling.min_tokens
    given = {None} if config.prompt_tokens is not None else {line.max_tokens for line in prompts}
    shortest = min((tokens for tokens in given if tokens is not None), default=least)
    says = f"must be at most {shortest}, the max_tokens of one of the prompts, got {least}"
    require(least <= shortest, "min_tokens", says)
    if None not in given or sampling.max_tokens is None:
        return
    shortest = _times(sampling.max_tokens, 1 - config.length_spread)
    says = f"must be at most {shortest}, the shortest answer with length_spread, got {least}"
    require(least <= shortest, "min_tokens", says)
    longest = _times(sampling.max_tokens, 1 + config.length_spread)
    says = f"gives answers of up to {longest} tokens, more than {limits.MAX_TOKENS}"
    require(longest <= limits.MAX_TOKENS, "length_spread", says)
