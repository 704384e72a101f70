"""`--deterministic`: bitwise equal log-probabilities for every K and tree, and any others in the pass."""

from __future__ import annotations

from typing import Any

import pytest
from harness.oracle import Ids, Oracle
from harness.prompts import SOURCE
from harness.stacks import RunningStack, together
from harness.waiting import HANG

from paceline.client import GenerationResult
from tests.integration.test_trees import shape_of

KS = (0, 2, 5)
OTHERS = 15
PARAMETERS: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "logprobs": 20}


def bits(result: GenerationResult) -> list[list[tuple[int, str]]]:
    """Every reported log-probability, exactly."""
    return [[(t, entry.logprob.hex()) for t, entry in position.items()] for position in result.logprobs]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_log_probabilities_are_bitwise_equal_for_any_k(
    deterministic: RunningStack, oracle: Oracle, temperature: float
) -> None:
    """K of 0, 2 and 5, alone and among 15 others of other lengths and parameters."""
    ids = oracle.encode(SOURCE)

    def call(prompt: Ids, k: int, seed: int, temperature: float) -> GenerationResult:
        sampling = PARAMETERS | {"temperature": temperature, "seed": seed}
        return deterministic.client.generate(
            prompt, sampling, speculation={"num_speculative_tokens": k}, timeout=HANG
        )

    prompt = ids[100:170]
    plain = call(prompt, 0, 7, temperature)
    assert plain.speculative_decoding.num_draft_tokens == 0
    for k in KS:
        alone = call(prompt, k, 7, temperature)
        assert (alone.speculative_decoding.num_accepted_draft_tokens > 0) == (k > 0)
        assert alone.token_ids == plain.token_ids
        assert bits(alone) == bits(plain)
        others = [
            lambda i=i: call(ids[9 * i : 9 * i + 5 + 13 * i], KS[i % 3], i, 0.3 * (i % 4))
            for i in range(OTHERS)
        ]
        among, *_ = together([lambda k=k: call(prompt, k, 7, temperature), *others], at_once=OTHERS + 1)
        assert among.token_ids == plain.token_ids
        assert bits(among) == bits(plain)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_log_probabilities_are_bitwise_equal_for_any_shape(
    deterministic: RunningStack, oracle: Oracle, temperature: float
) -> None:
    """For chains and trees, alone and among others of other shapes."""
    ids = oracle.encode(SOURCE)
    wanted = {"max_tokens": 32, "ignore_eos": True, "logprobs": 20, "temperature": temperature, "seed": 7}

    def call(prompt: Ids, k: int, width: int, nodes: int) -> list[list[tuple[int, str]]]:
        told = {"num_speculative_tokens": k} | (shape_of(width, nodes, 1) if k else {})
        result = deterministic.client.generate(prompt, wanted, speculation=told, timeout=HANG)
        assert (result.speculative_decoding.num_accepted_draft_tokens > 0) == (k > 0)
        return bits(result)

    prompt = ids[100:170]
    plain = call(prompt, 0, 1, 0)
    shapes = [(5, 1, 0), (4, 2, 8), (4, 4, 32)]
    assert [call(prompt, *shape) for shape in shapes] == [plain] * len(shapes)
    others = [lambda i=i: call(ids[9 * i : 9 * i + 12 + 13 * i], *shapes[i % 3]) for i in range(12)]
    calls = [*(lambda s=s: call(prompt, *s) for s in shapes), *others]
    assert together(calls, at_once=len(calls))[: len(shapes)] == [plain] * len(shapes)


def test_prompt_log_probabilities_are_bitwise_equal(deterministic: RunningStack, oracle: Oracle) -> None:
    """In chunks of any size: alone, and while other prompts are read."""
    ids = oracle.encode(SOURCE)

    def call(prompt: Ids) -> Any:
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 5}
        return deterministic.client.generate(prompt, sampling, timeout=HANG).prompt_logprobs

    alone = call(ids[:300])
    calls = [lambda: call(ids[:300]), *(lambda i=i: call(ids[50 * i : 250 + 90 * i]) for i in range(1, 8))]
    among, *_ = together(calls, at_once=8)
    assert among == alone
