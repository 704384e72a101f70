"""Sampled tokens have exactly the model's distribution, measured through the running service.

The seeds are fixed, so for one checkpoint the outcome is fixed as well: a run does not fail by chance. At
the stated level a correct service would have failed with one checkpoint in a thousand, all tests together.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from harness import chi_square
from harness.oracle import Ids, Oracle
from harness.stacks import RunningStack
from harness.waiting import HANG

from paceline.client import AsyncClient, CompletionOutput

MODES = ("coupled", "rejection", "block")
SEEDS = 2200
CHOICES = 8
"""Completions of one request, each by its own seed: requests cost more than what is sampled."""
AT_ONCE = 8
WARPERS = {"temperature": 0.8, "top_k": 6, "top_p": 0.9}
K = 3
MAX_TOKENS = 5
"""The first round has no proposal; the second one proposes tokens 2, 3 and 4; 5 is its bonus, or later."""
TOGETHER = 3
"""Tokens whose joint distribution is looked at as well."""
LEVEL = 1e-3 / ((MAX_TOKENS + 1) * len(MODES))
"""Of one chi-square test: 1e-3 over those of each mode, one a token and that of the joint (Bonferroni)."""
TEXT = "import "
"""Draft and target differ here: a biased acceptance (the draft's own noise in its test, say) is found with
these seeds at p < 1e-20, after `def main(` only in one mode of two."""


def chi_square_p(observed: Mapping[Hashable, int], expected: Mapping[Hashable, float]) -> float:
    """p-value of counts against exact probabilities; bins with less than 5 expected are pooled."""
    total = sum(observed.values())
    if any(expected.get(outcome, 0.0) <= 0 for outcome in observed):
        return 0.0  # something happened that cannot happen
    bins: list[tuple[float, float]] = []
    pooled_observed, pooled_expected = 0.0, 0.0
    for outcome, probability in sorted(expected.items(), key=lambda item: -item[1]):
        if probability * total >= 5:
            bins.append((observed.get(outcome, 0), probability * total))
        else:
            pooled_observed += observed.get(outcome, 0)
            pooled_expected += probability * total
    if pooled_expected >= 5 or not bins:
        bins.append((pooled_observed, pooled_expected))
    elif pooled_expected > 0:
        last_observed, last_expected = bins.pop()
        bins.append((last_observed + pooled_observed, last_expected + pooled_expected))
    if len(bins) < 2:
        return 1.0
    counts, expectations = zip(*bins, strict=True)
    return chi_square.p_value(counts, expectations)


@functools.cache
def exact_distributions(oracle: Oracle, prompt: Ids) -> dict[Ids, float]:
    """Probability of all tokens of a request that are possible: top_k keeps their number small."""
    paths: dict[Ids, float] = {(): 1.0}
    for _ in range(MAX_TOKENS):
        rows = oracle.distribution([prompt + path for path in paths], **WARPERS)
        paths = {
            (*path, token): probability * float(row[token])
            for (path, probability), row in zip(paths.items(), rows, strict=True)
            for token in row.nonzero()[:, 0].tolist()
        }
    assert sum(paths.values()) == pytest.approx(1, abs=1e-6)
    return paths


def marginal(paths: Mapping[Ids, float], part: slice) -> dict[Hashable, float]:
    """Of these tokens of a request."""
    result: dict[Hashable, float] = {}
    for path, probability in paths.items():
        result[path[part]] = result.get(path[part], 0.0) + probability
    return result


async def sample(
    address: str, prompt: Ids, mode: str, seeds: int = SEEDS, **speculation: Any
) -> tuple[list[Ids], int, int]:
    """The tokens of every seed, and how many were drafted and accepted."""
    room = asyncio.Semaphore(AT_ONCE)
    async with AsyncClient(address) as client:

        async def some(seed: int) -> tuple[CompletionOutput, ...]:
            wanted = {**WARPERS, "seed": seed, "n": CHOICES, "max_tokens": MAX_TOKENS, "ignore_eos": True}
            told = {"num_speculative_tokens": K, "acceptance": mode, **speculation}
            async with room:
                return (await client.generate(prompt, wanted, speculation=told, timeout=HANG)).outputs

        # A prime stride: neighbouring seeds are no easier for the generator than distant ones.
        results = await asyncio.gather(*(some(1 + 7919 * i) for i in range(seeds // CHOICES)))
    outputs = list(itertools.chain(*results))
    assert len({output.seed for output in outputs}) == seeds
    told = [output.speculative_decoding for output in outputs]
    drafted = sum(each.num_draft_tokens for each in told)
    accepted = sum(each.num_accepted_draft_tokens for each in told)
    return [output.token_ids for output in outputs], drafted, accepted


@pytest.mark.parametrize("mode", MODES)
async def test_sampled_tokens_have_the_models_distribution(
    stack: RunningStack, oracle: Oracle, mode: str
) -> None:
    prompt = oracle.encode(TEXT)
    paths = exact_distributions(oracle, prompt)
    tokens, drafted, accepted = await sample(stack.address, prompt, mode)
    # Both an acceptance and a rejection happened often, or nothing was tested.
    assert drafted >= SEEDS
    assert 0.02 * drafted < accepted < 0.98 * drafted
    parts = [slice(TOGETHER), *(slice(i, i + 1) for i in range(MAX_TOKENS))]
    tests = {
        f"tokens {part.start or 0} to {part.stop}": chi_square_p(
            Counter(t[part] for t in tokens), marginal(paths, part)
        )
        for part in parts
    }
    assert len(tests) == MAX_TOKENS + 1
    print(f"{mode}: accepted {accepted} of {drafted}; p-values {tests}")
    assert min(tests.values()) > LEVEL, tests


def counts_of(probabilities: Sequence[float], seed: int) -> dict[Hashable, int]:
    draws = np.random.default_rng(seed).multinomial(SEEDS, probabilities)
    return {token: int(n) for token, n in enumerate(draws) if n}


def test_the_chi_square_test_tells_draft_from_target() -> None:
    """It accepts the right distribution and refuses one that is 5 percent off in total variation."""
    p = np.array([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.004, 0.001])
    shift = np.array([-0.05, 0, 0, 0.05, 0, 0, 0, 0, 0])
    right = dict(enumerate(p.tolist()))
    values = [chi_square_p(counts_of(p, seed), right) for seed in range(200)]
    assert min(values) > LEVEL
    assert 0.4 < np.mean(values) < 0.6
    assert max(chi_square_p(counts_of(p + shift, seed), right) for seed in range(50)) < LEVEL
    assert chi_square_p({0: 10, 99: 1}, right) == 0
