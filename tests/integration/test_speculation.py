"""Speculation as a user sees it: coherent text, right statistics, and no effect of other requests."""

from __future__ import annotations

from typing import Any

import pytest
from harness.oracle import Oracle
from harness.prompts import SOURCE, TEXTS, id_prompts
from harness.stacks import RunningStack, together
from harness.waiting import HANG

from paceline.client import Client, GenerationResult, TokenOrigin


def check_report(result: GenerationResult, k: int) -> None:
    """The numbers of a result agree with each other and with its tokens' origins."""
    what = result.speculative_decoding
    assert sum(what.acceptance_histogram) == what.num_spec_steps <= what.num_rounds
    accepted = sum(i * n for i, n in enumerate(what.acceptance_histogram))
    assert accepted == what.num_accepted_draft_tokens <= what.num_draft_tokens <= k * what.num_spec_steps
    if what.num_draft_tokens:
        assert what.draft_acceptance_rate == pytest.approx(accepted / what.num_draft_tokens)
        plain = what.num_rounds - what.num_spec_steps
        length = (len(result.token_ids) - plain) / what.num_spec_steps
        assert what.mean_acceptance_length == pytest.approx(length)
        assert len(what.acceptance_rate_per_position) <= k
    shown = result.origins.count(TokenOrigin.ACCEPTED)
    assert len(result.origins) == len(result.token_ids) == result.usage.completion_tokens
    assert accepted == shown
    assert result.origins[0] is TokenOrigin.TARGET
    ends_accepted = result.origins[-1] is TokenOrigin.ACCEPTED
    assert len(result.token_ids) == what.num_rounds + accepted - ends_accepted


@pytest.mark.parametrize("mode", ["coupled", "rejection", "block"])
def test_sampled_speculation_is_coherent_and_reported(oracle: Oracle, client: Client, mode: str) -> None:
    """Sampling through three processes: the target's own text, and the acceptance rate reported."""
    prompt = oracle.encode(SOURCE)[:60]
    surprise = entropy = drafted = 0.0
    for seed in range(4):
        result = client.generate(
            prompt,
            {"temperature": 1.0, "seed": seed, "max_tokens": 48, "ignore_eos": True},
            speculation={"num_speculative_tokens": 4, "acceptance": mode},
            timeout=HANG,
        )
        check_report(result, 4)
        assert min(result.timings.target, result.timings.draft) > 0
        drafted += result.speculative_decoding.num_draft_tokens
        assert 0 <= result.speculative_decoding.draft_acceptance_rate <= 1
        assert (result.seed, result.acceptance.value) == (seed, mode)
        whole = oracle.decode(prompt + result.token_ids)
        assert whole.endswith(result.text)
        rows = oracle.logits(prompt, result.token_ids[:-1]).double().log_softmax(-1)
        surprise -= float(sum(row[t] for row, t in zip(rows, result.token_ids, strict=True)))
        entropy -= float((rows.exp() * rows).sum())
    assert drafted > 0
    # Coherent: no more surprising to the target than its own samples, whose surprise is its entropy.
    assert surprise / 192 == pytest.approx(entropy / 192, abs=0.5)


def mixed_requests(oracle: Oracle) -> list[tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Different K, modes, lengths, sampling, ends; speculative and not."""
    requests: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []
    samplings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1},
        {"temperature": 1.0, "min_p": 0.02, "frequency_penalty": 0.2, "min_tokens": 4},
    ]
    prompts: list[Any] = [*id_prompts(oracle), *TEXTS]
    for i, prompt in enumerate(prompts):
        sampling = {"seed": 50 + i, "max_tokens": 5 + (7 * i) % 36, **samplings[i % 4]}
        requests.append((prompt, sampling, {"num_speculative_tokens": (0, 1, 2, 4, 8)[i % 5]}))
    return requests


def test_concurrent_requests_get_the_tokens_they_get_alone(
    stack: RunningStack, oracle: Oracle, client: Client
) -> None:
    """All at once, each with the tokens it has alone; sequences join and leave while others run."""
    requests = mixed_requests(oracle)

    def run(number: int) -> GenerationResult:
        prompt, sampling, speculation = requests[number]
        # Every mode decides greedy requests alike; coupled sampling is the one that is reproducible.
        greedy = sampling["temperature"] == 0
        mode = ("coupled", "rejection", "block")[number // 4 % 3] if greedy else "coupled"
        return client.generate(
            prompt, sampling, speculation={**speculation, "acceptance": mode}, timeout=HANG
        )

    numbers = range(len(requests))
    alone = [run(i) for i in numbers]
    at_once = together([lambda i=i: run(i) for i in numbers], at_once=len(requests))
    for i in numbers:
        assert at_once[i].token_ids == alone[i].token_ids, requests[i][1:]
        assert (at_once[i].text, at_once[i].finish_reason) == (alone[i].text, alone[i].finish_reason)
        check_report(at_once[i], requests[i][2]["num_speculative_tokens"])
    speculated = [r.speculative_decoding.num_draft_tokens > 0 for r in at_once]
    assert any(speculated)
    assert not all(speculated)
    stack.check_pools_whole()


def test_ratio_modes_are_reproducible_by_seed(oracle: Oracle, client: Client) -> None:
    """A seed fixes the tokens of rejection and block mode too, for one K and one draft."""
    prompt = oracle.encode(SOURCE)[:50]
    for mode in ("rejection", "block"):
        runs = [
            client.generate(
                prompt,
                {"temperature": 1.0, "seed": 3, "max_tokens": 32},
                speculation={"num_speculative_tokens": 4, "acceptance": mode},
                timeout=HANG,
            )
            for _ in range(2)
        ]
        assert runs[0].token_ids == runs[1].token_ids
        assert runs[0].speculative_decoding == runs[1].speculative_decoding
