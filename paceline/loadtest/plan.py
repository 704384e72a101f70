"""What is sent, in order and when: a function of the settings, without a clock."""

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
    """Seconds after the start; None: as soon as there is a place."""
    prompt: str | tuple[int, ...]
    sampling: SamplingParams


def arrivals(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds from the start at which requests are due, `rate` a second on average.

    The gaps are gamma-distributed with the shape `burstiness`: exponential where it is 1, so that arrivals
    are a Poisson process; their coefficient of variation is 1/√burstiness.
    """
    chosen = random.Random(seed)
    due = 0.0
    while True:
        due += chosen.gammavariate(burstiness, 1 / (rate * burstiness))
        yield due


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """All requests of a test. The same settings give the same ones."""

    config: LoadConfig
    prompts: Prompts
    sampling: SamplingParams
    """Of every request but for its seed; seeds count up from this one, or from 0."""
    vocabulary_size: int
    """Random prompts are made of it."""

    def __iter__(self) -> Iterator[Ask]:
        """In the order they are sent."""
        config = self.config
        due: Iterator[float | None] = repeat(None)
        if config.rate is not None:
            due = arrivals(config.rate, config.burstiness, self.sampling.seed or 0)
        for number, when in zip(islice(count(), config.most_requests), due, strict=False):
            if when is not None and config.duration is not None and when >= config.duration:
                return
            yield self.ask(number, when)

    def ask(self, number: int, due: float | None = None) -> Ask:
        """The request of that number. Prompts come in turn."""
        seed = ((self.sampling.seed or 0) + number) % (limits.MAX_SEED + 1)
        chosen = random.Random(seed)
        line = self._random_prompt(chosen) or self.prompts[number % len(self.prompts)]
        tokens = line.max_tokens
        if tokens is None and self.sampling.max_tokens is not None:
            tokens = self._spread(chosen, self.sampling.max_tokens)  # within what check_lengths let pass
        return Ask(number, due, line.prompt, replace(self.sampling, seed=seed, max_tokens=tokens))

    def _random_prompt(self, chosen: random.Random) -> PromptLine | None:
        if self.config.prompt_tokens is None:
            return None
        length = self._spread(chosen, self.config.prompt_tokens)
        return PromptLine(tuple(chosen.randrange(self.vocabulary_size) for _ in range(length)))

    def _spread(self, chosen: random.Random, tokens: int) -> int:
        """As many, more or less."""
        spread = self.config.length_spread
        return _times(tokens, chosen.uniform(1 - spread, 1 + spread)) if spread else tokens


def _times(tokens: int, factor: float) -> int:
    return max(1, round(tokens * factor))


def check_lengths(config: LoadConfig, prompts: Prompts, sampling: SamplingParams) -> None:
    """Refuse answers that some request of a plan could not ask for: a plan is sent while it is made, and one
    that cannot be made would end the test in its midst. Raises InvalidArgumentError naming the field."""
    least = sampling.min_tokens
    given = {None} if config.prompt_tokens is not None else {line.max_tokens for line in prompts}
    shortest = min((tokens for tokens in given if tokens is not None), default=least)
    says = f"must be at most {shortest}, the max_tokens of one of the prompts, got {least}"
    require(least <= shortest, "min_tokens", says)
    if None not in given or sampling.max_tokens is None:
        return
    shortest = _times(sampling.max_tokens, 1 - config.length_spread)
    says = f"must be at most {shortest}, the shortest answer that length_spread gives, got {least}"
    require(least <= shortest, "min_tokens", says)
    longest = _times(sampling.max_tokens, 1 + config.length_spread)
    says = f"gives answers of up to {longest} tokens, more than {limits.MAX_TOKENS}"
    require(longest <= limits.MAX_TOKENS, "length_spread", says)
