"""Greedy speculative decoding gives the tokens that transformers' own generate gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from harness.oracle import Ids, Oracle, ParityError
from harness.prompts import LENGTHS, SOURCE, TEXTS, id_prompts
from harness.stacks import together
from harness.tiers import mostly_full
from harness.waiting import HANG

from paceline.client import Client, GenerationResult

MODES = ("coupled", "rejection", "block")
KS = (0, 5, 1, 3, 8)
EVERY = [(0, "coupled"), *((k, mode) for k in KS[1:] for mode in MODES)]
"""(K, mode). Without drafts no mode has anything to decide."""
NEW_TOKENS = 24


def greedy_call(
    client: Client, prompt: Ids | str, k: int, mode: str, max_tokens: int = NEW_TOKENS, **sampling: object
) -> Callable[[], GenerationResult]:
    parameters = {"temperature": 0, "max_tokens": max_tokens, **sampling}
    speculation = {"num_speculative_tokens": k, "acceptance": mode}
    return lambda: client.generate(prompt, parameters, speculation=speculation, timeout=HANG)


def check_parity(
    oracle: Oracle, client: Client, asked: Sequence[tuple[Ids, int, str]], at_once: int, **sampling: object
) -> list[GenerationResult]:
    """Every (prompt, K, mode) has generate's tokens, whoever runs beside it."""
    calls = [greedy_call(client, prompt, k, mode, **sampling) for prompt, k, mode in asked]
    results = together(calls, at_once)
    ties = 0
    for (prompt, k, mode), result in zip(asked, results, strict=True):
        try:
            ties += oracle.check_greedy(prompt, result.token_ids, NEW_TOKENS)
        except ParityError as error:
            raise ParityError(f"prompt of {len(prompt)}, K={k}, {mode}, {at_once} at once: {error}") from None
    print(f"{len(results)} requests, {ties} proven near-ties")
    assert ties <= len(results) // 20, "near-ties are rare; so many have another cause"
    return results


def test_speculative_greedy_parity(oracle: Oracle, client: Client) -> None:
    """The whole contract in small: draft in one process, target in another, generate's tokens out."""
    prompt = oracle.encode(SOURCE)[:40]
    (result,) = check_parity(oracle, client, [(prompt, 4, "coupled")], at_once=1)
    assert result.speculative_decoding.num_draft_tokens > 0
    assert result.text == oracle.decode(prompt + result.token_ids)[len(oracle.decode(prompt)) :]


@pytest.mark.parametrize("k", mostly_full(KS, count=3))
def test_greedy_parity_one_at_a_time(oracle: Oracle, client: Client, k: int) -> None:
    """Every prompt with this K; each mode has its turn."""
    prompts = id_prompts(oracle)
    assert len(prompts) >= 20
    asked = [(prompt, k, MODES[(i + k) % 3]) for i, prompt in enumerate(prompts)]
    results = check_parity(oracle, client, asked, at_once=1)
    assert any(r.speculative_decoding.num_accepted_draft_tokens for r in results) == (k > 0)


@pytest.mark.parametrize(("k", "mode"), mostly_full(EVERY, count=4))
def test_greedy_parity_sixteen_at_once(oracle: Oracle, client: Client, k: int, mode: str) -> None:
    asked = [(prompt, k, mode) for prompt in id_prompts(oracle)]
    results = check_parity(oracle, client, asked, at_once=16)
    assert any(r.speculative_decoding.num_accepted_draft_tokens for r in results) == (k > 0)


@pytest.mark.parametrize("text", TEXTS)
def test_greedy_parity_of_text_prompts(oracle: Oracle, client: Client, text: str) -> None:
    """The coordinator's tokenizer gives transformers' ids."""
    prompt = oracle.encode(text)
    assert client.tokenize(text) == prompt
    result = greedy_call(client, text, 4, "coupled")()
    oracle.check_greedy(prompt, result.token_ids, NEW_TOKENS)
    assert result.usage.prompt_tokens == len(prompt)


@pytest.mark.parametrize(("k", "mode"), mostly_full(EVERY, count=4))
def test_greedy_parity_with_repetition_penalty(oracle: Oracle, client: Client, k: int, mode: str) -> None:
    """The penalty's context grows along a proposal as it grows in plain decoding."""
    prompt = oracle.encode(SOURCE)[: LENGTHS[12]]
    result = greedy_call(client, prompt, k, mode, repetition_penalty=1.3)()
    oracle.check_greedy(prompt, result.token_ids, NEW_TOKENS, repetition_penalty=1.3)


def bias_that_ends_at(oracle: Oracle, prompt: Ids, generated: Ids) -> tuple[int, float]:
    """(index, bias) with which greedy decoding takes end-of-sequence at `index`, somewhere inside."""
    eos = min(oracle.eos_token_ids)
    rows = oracle.logits(prompt, generated[:-1])
    gaps = (rows.max(-1).values - rows[:, eos])[2:]
    order = gaps.sort().values
    # Half-way between the smallest gap and the next one, so that no near-tie decides.
    bias = float((order[0] + order[1]) / 2)
    return int(gaps.argmin()) + 2, bias


@pytest.mark.parametrize(("k", "mode"), mostly_full(EVERY, count=4))
def test_greedy_parity_at_end_of_sequence(oracle: Oracle, client: Client, k: int, mode: str) -> None:
    """EOS inside a proposal, as bonus or correction: the tokens up to it and none after."""
    (eos,) = oracle.eos_token_ids
    for prompt in id_prompts(oracle)[9 + k % 3 :][:2]:
        free = oracle.greedy(prompt, NEW_TOKENS, ignore_eos=True)
        first = next((i for i, token in enumerate(free) if token == eos), NEW_TOKENS)
        _, bias = bias_that_ends_at(oracle, prompt, free[: max(first, 6)])
        biased = {"bias": ((eos, bias),)}
        want = oracle.greedy(prompt, NEW_TOKENS, **biased)
        result = greedy_call(client, prompt, k, mode, logit_bias={eos: bias})()
        oracle.check_greedy(prompt, result.token_ids, NEW_TOKENS, **biased)
        if result.token_ids == want:
            assert eos in want
            assert (result.finish_reason, result.stop_reason) == ("stop", None)
        past = greedy_call(client, prompt, k, mode, logit_bias={eos: bias}, ignore_eos=True)()
        oracle.check_greedy(prompt, past.token_ids, NEW_TOKENS, ignore_eos=True, **biased)
        assert (len(past.token_ids), past.finish_reason) == (NEW_TOKENS, "length")


@pytest.mark.planted
def test_a_planted_difference_is_found(oracle: Oracle) -> None:
    """One wrong token, a missing one and one too many are errors."""
    prompt = oracle.encode(SOURCE)[:20]
    want = oracle.greedy(prompt, 12, ignore_eos=True)
    assert oracle.check_greedy(prompt, want, 12, ignore_eos=True) == 0
    wrong = (*want[:5], (want[5] + 1) % oracle.vocabulary_size, *want[6:])
    for bad in (wrong, want[:-1], (*want, want[-1])):
        with pytest.raises(ParityError):
            oracle.check_greedy(prompt, bad, 12, ignore_eos=True)
