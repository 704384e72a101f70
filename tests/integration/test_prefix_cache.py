"""Real processes: a request uses another one's cached entries, and its tokens are unchanged."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import httpx2
import pytest
from harness.commands import command
from harness.oracle import Ids, Oracle
from harness.pair import Pair
from harness.prompts import SOURCE
from harness.stacks import RunningStack, running_stack, together
from harness.waiting import HANG

from paceline.core.limits import MAX_CACHE_SALT_CHARACTERS

BLOCK = 16
"""Of the shared stack."""
LENGTH = 300
FULL = LENGTH // BLOCK * BLOCK
"""Entries in the full blocks of a prompt: all that can come from the cache."""
salts = (f"salt {i}" for i in itertools.count())
"""Nothing is cached under a new one."""


def prompt_of(oracle: Oracle, beginning: int = 0) -> Ids:
    ids = oracle.encode(SOURCE * 3)
    return ids[beginning : beginning + LENGTH]


def counts(stack: RunningStack, role: str) -> tuple[int, int]:
    info = stack.worker(role).info
    return info.cache.prefix_cache_queries, info.cache.prefix_cache_hits


@pytest.mark.parametrize("mode", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_cached_prompt_gives_the_tokens_of_a_cold_one(
    stack: RunningStack, oracle: Oracle, mode: str, temperature: float
) -> None:
    prompt, salt = prompt_of(oracle), next(salts)

    def tokens(of: str) -> Ids:
        return stack.client.generate(
            prompt,
            {"max_tokens": 24, "ignore_eos": True, "temperature": temperature, "seed": 5},
            speculation={"num_speculative_tokens": 4, "acceptance": mode, "prompt_lookup": False},
            cache_salt=of,
            timeout=HANG,
        ).token_ids

    at_first = {role: counts(stack, role) for role in ("target", "draft")}
    cold = tokens(salt)
    between = {role: counts(stack, role) for role in ("target", "draft")}
    warm = tokens(salt)
    at_last = {role: counts(stack, role) for role in ("target", "draft")}
    assert warm == cold == tokens(next(salts))
    for role in ("target", "draft"):
        assert between[role][1] == at_first[role][1], "nothing was there to hit"
        assert at_last[role][1] - between[role][1] == FULL
        assert at_last[role][0] - between[role][0] >= LENGTH
    if temperature == 0:
        oracle.check_greedy(prompt, warm, 24, ignore_eos=True)


def test_usage_reports_the_cached_tokens(stack: RunningStack, oracle: Oracle) -> None:
    prompt, salt = prompt_of(oracle), next(salts)
    told = [
        stack.client.generate(prompt, {"max_tokens": 2, "n": 2}, cache_salt=salt, timeout=HANG).usage
        for _ in range(2)
    ]
    assert [usage.cached_prompt_tokens for usage in told] == [0, FULL]


def test_only_the_common_prefix_is_shared(stack: RunningStack, oracle: Oracle) -> None:
    salt, same = next(salts), prompt_of(oracle)
    first, second = (*same, 5, 6, 7), (*same[: 10 * BLOCK], *prompt_of(oracle, 37)[:90])
    greedy = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
    for prompt in (first, second):
        before = counts(stack, "target")[1]
        got = stack.client.generate(prompt, greedy, cache_salt=salt, timeout=HANG).token_ids
        found = counts(stack, "target")[1] - before
        oracle.check_greedy(prompt, got, 16, ignore_eos=True)
    assert found == 10 * BLOCK


def test_another_salt_misses(stack: RunningStack, oracle: Oracle) -> None:
    prompt = prompt_of(oracle)
    before = {role: counts(stack, role)[1] for role in ("target", "draft")}
    for _ in range(3):
        stack.client.generate(prompt, {"max_tokens": 8}, cache_salt=next(salts), timeout=HANG)
    assert {role: counts(stack, role)[1] for role in ("target", "draft")} == before


def test_a_scored_prompt_reports_all_tokens_when_cached(stack: RunningStack, oracle: Oracle) -> None:
    prompt, salt = prompt_of(oracle), next(salts)
    told = [
        stack.client.generate(
            prompt, {"max_tokens": 2, "temperature": 0, "prompt_logprobs": 1}, cache_salt=salt, timeout=HANG
        ).prompt_logprobs
        for _ in range(2)
    ]
    assert len(told[1]) == LENGTH
    for cold, warm in zip(told[0][1:], told[1][1:], strict=True):
        token_id = next(iter(cold))
        assert next(iter(warm)) == token_id
        assert warm[token_id].logprob == pytest.approx(cold[token_id].logprob, abs=1e-4)


def test_concurrent_requests_share_one_cached_prompt(stack: RunningStack, oracle: Oracle) -> None:
    prompt, salt = prompt_of(oracle), next(salts)
    sampled = {"temperature": 1.0, "max_tokens": 16, "ignore_eos": True}

    def call(seed: int, of: str) -> Ids:
        return stack.client.generate(prompt, {**sampled, "seed": seed}, cache_salt=of, timeout=HANG).token_ids

    alone = [call(seed, next(salts)) for seed in range(4)]
    call(0, salt)
    assert together([lambda s=s: call(s, salt) for s in range(4)], at_once=4) == alone


def test_the_prefix_cache_works_over_http(stack: RunningStack, oracle: Oracle) -> None:
    prompt, salt = prompt_of(oracle), next(salts)
    body = {"prompt": list(prompt), "max_tokens": 4, "temperature": 0, "cache_salt": salt}
    url = f"http://{stack.stack.http_address}/v1/completions"
    texts = []
    for _ in range(2):
        before = counts(stack, "target")[1]
        answer = httpx2.post(url, json=body, timeout=HANG)
        assert answer.status_code == 200, answer.text
        texts.append(answer.json()["choices"][0]["text"])
        found = counts(stack, "target")[1] - before
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == found
    long_salt = "x" * (MAX_CACHE_SALT_CHARACTERS + 1)
    too_long = httpx2.post(url, json={**body, "cache_salt": long_salt}, timeout=HANG)
    assert texts[0] == texts[1]
    assert found == FULL
    assert too_long.status_code == 400
    assert too_long.json()["error"]["param"] == "cache_salt"


def test_status_shows_hits_and_preemptions(stack: RunningStack) -> None:
    words = ("status", "--address", stack.address)
    shown = command(*words).stdout
    assert "prefix hits" in shown
    assert "preemptions" in shown
    told = json.loads(command(*words, "--json").stdout)
    target = next(w for w in told["workers"] if w["role"] == "target")["info"]["cache"]
    assert target["prefix_cache_queries"] >= target["prefix_cache_hits"] >= 0
    assert (target["num_preemptions"], told["coordinator"]["num_preemptions"]) == (0, 0)


# ---- pressure ----------------------------------------------------------------------------------------

REQUESTS, PROMPT, NEW_TOKENS, SMALL_BLOCK = 12, 48, 40, 8
NEED = REQUESTS * -(-(PROMPT + NEW_TOKENS) // SMALL_BLOCK)


@pytest.fixture(scope="module")
def crammed(pair_paths: Pair) -> Iterator[RunningStack]:
    with running_stack(pair_paths, num_blocks=NEED // 4, block_size=SMALL_BLOCK, http=False) as stack:
        yield stack
        stack.check_logs()


def preemptions(stack: RunningStack) -> tuple[int, int]:
    """By the coordinator, and on the target."""
    status = stack.client.status()
    info = next(w.info for w in status.workers if w.role == "target")
    return status.coordinator.num_preemptions, info.cache.num_preemptions


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_pool_of_a_quarter_size_finishes_all_requests(
    crammed: RunningStack, oracle: Oracle, temperature: float
) -> None:
    """All requests finish with the tokens they get alone, and sequences were preempted."""
    ids = oracle.encode(SOURCE * 3)
    prompts = [ids[29 * i : 29 * i + PROMPT] for i in range(REQUESTS)]

    def call(i: int) -> Ids:
        parameters = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": temperature, "seed": i}
        speculation = {"num_speculative_tokens": 3}
        return crammed.client.generate(
            prompts[i], parameters, speculation=speculation, timeout=HANG
        ).token_ids

    at_first = preemptions(crammed)
    alone = [call(i) for i in range(REQUESTS)]
    before = preemptions(crammed)
    assert before[0] == at_first[0]
    assert together([lambda i=i: call(i) for i in range(REQUESTS)], at_once=REQUESTS) == alone
    after = preemptions(crammed)
    assert after[1] > before[1], "the target"
    assert after[0] > before[0]
    assert crammed.client.status().coordinator.failed_requests == 0
    crammed.check_pools_whole()
