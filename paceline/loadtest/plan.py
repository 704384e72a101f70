"""What is sent, in order and when: a function of the settings, without a clock."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice, repeat

from paceline.core import limits
from paceline.core.types import SamplingParams
from paceline.loadtest.config import LoadConfig
from paceline.loadtest.prompts import Prompts


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    number: int
    due: float | None
    """Seconds after the start; None: as soon as there is a place."""
    prompt: str | tuple[int, ...]
    sampling: SamplingParams


def arrivals(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds from the start at which requests are due, `rate` a second on average; the first at once.

    The gaps are gamma-distributed with the shape `burstiness`: exponential where it is 1, so that arrivals
    are a Poisson process; their coefficient of variation is 1/√burstiness.
    """
    chosen = random.Random(seed)
    due = 0.0
    while True:
        yield due
        due += chosen.gammavariate(burstiness, 1 / (rate * burstiness))


def plan(config: LoadConfig, prompts: Prompts, sampling: SamplingParams) -> Iterator[Ask]:
    """All requests of a test, in the order they are sent."""
    due: Iterator[float | None] = repeat(None)
    if config.rate is not None:
        due = arrivals(config.rate, config.burstiness, sampling.seed or 0)
    for number, when in zip(islice(count(), config.most_requests), due, strict=False):
        if when is not None and config.duration is not None and when >= config.duration:
            return
        yield ask(prompts, sampling, number, when)


def ask(prompts: Prompts, sampling: SamplingParams, number: int, due: float | None = None) -> Ask:
    """The request of that number. Prompts come in turn; seeds count up from the one given, or from 0."""
    line = prompts[number % len(prompts)]
    seed = ((sampling.seed or 0) + number) % (limits.MAX_SEED + 1)
    tokens = sampling.max_tokens if line.max_tokens is None else line.max_tokens
    return Ask(number, due, line.prompt, replace(sampling, seed=seed, max_tokens=tokens))
