"""Too few blocks for all requests: they wait for each other, and all finish with the right tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from harness.oracle import Ids, Oracle
from harness.pair import Pair
from harness.prompts import SOURCE
from harness.refusals import refused
from harness.stacks import RunningStack, own_coordinator, sound_stack, together
from harness.tiers import mostly_full
from harness.waiting import HANG, until
from harness.web import connect
from harness.wire import Line, next_round

from paceline.core.errors import NotFoundError
from paceline.core.messages import SequenceFailed

NUM_BLOCKS = 12
BLOCK = 8
DRAFT_BLOCKS = 8
"""The draft has even less room: losing it costs speed only."""
LEASE = 2.0
"""Seconds. A sequence that waits for longer loses its place in the draft and is opened again."""
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def small(pair_paths: Pair) -> Iterator[RunningStack]:
    with sound_stack(
        pair_paths,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK,
        target={"lease_seconds": LEASE},
        draft={"num_blocks": DRAFT_BLOCKS, "lease_seconds": LEASE},
    ) as stack:
        yield stack


def prompts_of(oracle: Oracle, count: int) -> list[Ids]:
    """Each needs 5 to 9 of the 12 blocks in the end."""
    ids = oracle.encode(SOURCE)
    return [ids[11 * i : 11 * i + 14 + (5 * i) % 33] for i in range(count)]


def check(stack: RunningStack, oracle: Oracle, count: int, k: int, address: str | None = None) -> None:
    prompts = prompts_of(oracle, count)
    parameters: dict[str, Any] = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    client = stack.client

    def call(prompt: Ids) -> Ids:
        speculation = {"num_speculative_tokens": k}
        return client.generate(prompt, parameters, speculation=speculation, timeout=HANG).token_ids

    results = together([lambda p=p: call(p) for p in prompts], at_once=count)
    for prompt, tokens in zip(prompts, results, strict=True):
        oracle.check_greedy(prompt, tokens, NEW_TOKENS, ignore_eos=True)


def waits(stack: RunningStack) -> float:
    """Times that a sequence was without blocks, or had to give its own up."""
    (http,) = [*connect(stack.client.status().coordinator.http_address)]
    return http.total("paceline:block_waits_total") + http.total("paceline:num_preemptions_total")


@pytest.mark.parametrize(("count", "k"), mostly_full([(12, 4), (3, 0), (2, 4), (3, 4), (12, 0)], count=2))
def test_requests_too_large_together_all_finish(
    small: RunningStack, oracle: Oracle, count: int, k: int
) -> None:
    """A few may fit one after another; of a dozen some must wait."""
    before = waits(small)
    for _ in range(2):
        check(small, oracle, count, k)
        small.check_pools_whole()
    if count == 12:
        assert waits(small) > before


def test_memory_pressure_changes_no_sampled_token(small: RunningStack, oracle: Oracle) -> None:
    """Being evicted and prefilled again changes nothing (coupled mode)."""
    prompts = prompts_of(oracle, 8)
    parameters = {"temperature": 1.0, "max_tokens": NEW_TOKENS, "ignore_eos": True}

    def call(i: int) -> Ids:
        return small.client.generate(prompts[i], {**parameters, "seed": i}, timeout=HANG).token_ids

    alone = [call(i) for i in range(8)]
    assert together([lambda i=i: call(i) for i in range(8)], at_once=8) == alone


def test_a_request_larger_than_the_pool_is_refused(small: RunningStack, oracle: Oracle) -> None:
    """The pool bounds the model's length, so the refusal names the field and comes before any work."""
    (model,) = small.client.models()
    assert model.max_model_len == NUM_BLOCKS * BLOCK
    with refused("prompt"):
        small.client.generate([5] * (NUM_BLOCKS * BLOCK), {"max_tokens": 1}, timeout=HANG)
    with refused("max_tokens"):
        small.client.generate([5] * 40, {"max_tokens": NUM_BLOCKS * BLOCK}, timeout=HANG)
    small.good_request()


def test_a_full_pool_serves_the_largest_request(small: RunningStack, oracle: Oracle) -> None:
    prompt = oracle.encode(SOURCE)[: NUM_BLOCKS * BLOCK - 10]
    result = small.client.generate(
        prompt, {"temperature": 0, "max_tokens": 10, "ignore_eos": True}, timeout=HANG
    )
    oracle.check_greedy(prompt, result.token_ids, 10, ignore_eos=True)


def test_preempted_trees_finish_with_the_right_tokens(small: RunningStack, oracle: Oracle) -> None:
    """By a coordinator of the same workers that drafts trees."""
    target, draft = (small.stack.address_of(role) for role in ("target", "draft"))
    with own_coordinator(small.pair, [target], [draft], tree_width=3, max_tree_nodes=12) as own:
        trees = replace(small, client=own.client)
        test_requests_too_large_together_all_finish(trees, oracle, 12, 4)
        test_memory_pressure_changes_no_sampled_token(trees, oracle)
        test_a_full_pool_serves_the_largest_request(trees, oracle)


def test_a_long_queue_is_not_a_lost_target(small: RunningStack, oracle: Oracle) -> None:
    """A queue longer than the recovery timeout is no lost target worker."""
    target, draft = (small.stack.address_of(role) for role in ("target", "draft"))
    prompts = prompts_of(oracle, 12)
    parameters = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    with own_coordinator(small.pair, [target], [draft], max_running=1, recovery_timeout=0.2) as own:
        results = together(
            [lambda p=p: own.client.generate(p, parameters, timeout=HANG) for p in prompts], at_once=12
        )
        for prompt, result in zip(prompts, results, strict=True):
            oracle.check_greedy(prompt, result.token_ids, NEW_TOKENS, ignore_eos=True)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_an_expired_lease_frees_the_blocks(small: RunningStack, oracle: Oracle, role: str) -> None:
    with Line(small.stack.address_of(role), role) as line:
        sequence = line.open(oracle.encode(SOURCE)[:30])
        assert not isinstance(line.ask(next_round(sequence)), SequenceFailed)
        assert line.used_blocks() > 0
        until(lambda: line.info().cache.sequences == 0, "the end of the lease")
        assert line.used_blocks() == 0
        assert isinstance(line.refused(next_round(sequence)), NotFoundError)
