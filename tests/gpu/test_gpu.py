"""Parity and invariance with both models on a CUDA device: the assertions of the CPU."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
from harness.oracle import Oracle
from harness.pair import Pair
from harness.prompts import SOURCE, id_prompts
from harness.stacks import RunningStack, sound_stack, together
from harness.waiting import HANG

pytestmark = pytest.mark.gpu

MODES = ("coupled", "rejection", "block")
NEW_TOKENS = 24


@contextlib.contextmanager
def on_cuda(pair: Pair, dtype: str) -> Iterator[RunningStack]:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    devices = {"target_device": "cuda", "draft_device": "cuda"}
    with sound_stack(pair, **devices, target_dtype=dtype, draft_dtype=dtype) as stack:
        yield stack


@pytest.fixture(scope="module")
def gpu_stack(pair_paths: Pair) -> Iterator[RunningStack]:
    with on_cuda(pair_paths, "float32") as stack:
        yield stack


@pytest.fixture(scope="module")
def stack_of_16_bits(pair_paths: Pair) -> Iterator[RunningStack]:
    """What a GPU serves as a rule: other kernels than those of float32."""
    with on_cuda(pair_paths, "bfloat16") as stack:
        yield stack


@pytest.mark.parametrize("at_once", [1, 16])
@pytest.mark.parametrize("k", [0, 1, 3, 5, 8])
def test_greedy_parity_on_cuda(gpu_stack: RunningStack, pair_paths: Pair, k: int, at_once: int) -> None:
    """The oracle runs on the same device, so that only the shapes differ."""
    oracle = Oracle.load(pair_paths.target, "cuda")
    asked = [(prompt, MODES[i % 3]) for i, prompt in enumerate(id_prompts(oracle))]
    results = together(
        [
            lambda p=p, m=m: gpu_stack.client.generate(
                p,
                {"temperature": 0.0, "max_tokens": NEW_TOKENS},
                speculation={"num_speculative_tokens": k, "acceptance": m},
                timeout=HANG,
            )
            for p, m in asked
        ],
        at_once,
    )
    ties = sum(
        oracle.check_greedy(prompt, result.token_ids, NEW_TOKENS)
        for (prompt, _), result in zip(asked, results, strict=True)
    )
    assert ties <= 2


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0.9, "repetition_penalty": 1.2},
        {"bad_words": ["self", "energy", "return"], "allowed_token_ids": list(range(2000))},
    ],
    ids=["temperature", "top_p", "penalty", "masks"],
)
def test_coupled_invariance_on_cuda(
    gpu_stack: RunningStack, oracle: Oracle, sampling: dict[str, Any]
) -> None:
    prompt = oracle.encode(SOURCE)[:37]

    def run(k: int) -> tuple[int, ...]:
        parameters = {"max_tokens": 40, "ignore_eos": True, "seed": 11, **sampling}
        speculation = {"num_speculative_tokens": k, "acceptance": "coupled"}
        return gpu_stack.client.generate(prompt, parameters, speculation=speculation, timeout=HANG).token_ids

    alone = [run(k) for k in (0, 2, 5)]
    assert alone == [alone[0]] * 3
    assert together([lambda k=k: run(k) for k in (0, 2, 5) * 5], at_once=15) == [alone[0]] * 15


def log_probabilities(stack: RunningStack, oracle: Oracle, k: int) -> tuple[list[float], list[float]]:
    """Of a prompt, over several scored chunks, and of the output: what is told, and what the oracle says."""
    prompt = oracle.encode(SOURCE)[:450]
    parameters = {"max_tokens": 24, "seed": 5, "logprobs": 5, "prompt_logprobs": 0}
    speculation = {"num_speculative_tokens": k}
    result = stack.client.generate(prompt, parameters, speculation=speculation, timeout=HANG)
    assert result.logprobs is not None
    assert result.prompt_logprobs is not None
    told = [*result.prompt_logprobs[1:], *result.logprobs]
    tokens = [*prompt[1:], *result.token_ids]
    rows = oracle.logits(prompt[:1], tokens[:-1]).double().log_softmax(-1)
    assert all(position is not None for position in told)
    return (
        [position[token].logprob for position, token in zip(told, tokens, strict=True) if position],
        [float(row[token]) for row, token in zip(rows, tokens, strict=True)],
    )


@pytest.mark.parametrize("k", [0, 3])
def test_log_probabilities_on_cuda(gpu_stack: RunningStack, oracle: Oracle, k: int) -> None:
    told, expected = log_probabilities(gpu_stack, oracle, k)
    assert told == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("k", [0, 3])
def test_log_probabilities_of_16_bits_on_cuda(stack_of_16_bits: RunningStack, oracle: Oracle, k: int) -> None:
    """Beside the oracle's of 32: far from rounding, and far from those of another position."""
    told, expected = log_probabilities(stack_of_16_bits, oracle, k)
    distance, length = math.dist(told, expected), math.hypot(*expected)
    assert distance < 0.2 * length
