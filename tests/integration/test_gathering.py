"""Sequences share passes where a pass takes longer than the way back to the next one."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from harness.oracle import Oracle
from harness.pair import Pair
from harness.prompts import SOURCE
from harness.stacks import RunningStack, running_stack
from harness.waiting import HANG
from prometheus_client.parser import text_string_to_metric_families

SEQUENCES = 4
PASS_SECONDS = 0.06
"""Much more than the way to the coordinator and back takes, also on a busy machine."""
ALWAYS = 3.4
"""Of four. With nobody waited for, two groups take turns: 2.0."""


@pytest.fixture(scope="module")
def slow(pair_paths: Pair) -> Iterator[RunningStack]:
    target = {"least_pass_seconds": PASS_SECONDS}
    with running_stack(pair_paths, log_format="json", target_metrics_port=0, target=target) as running:
        yield running
        running.check_pools_whole()
        running.check_logs()


def passes_of(running: RunningStack) -> tuple[float, float]:
    """(passes, sequences in all of them) up to now."""
    started = (json.loads(x.partition("] ")[2]) for x in running.log.find('"metrics_address"'))
    (address,) = (line["metrics_address"] for line in started if line["role"] == "target")
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=HANG) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    found = {
        sample.name.rpartition("_")[2]: sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith("paceline:worker_pass_sequences_") and sample.labels.get("kind") == "rounds"
    }
    return found["count"], found["sum"]


def generate(running: RunningStack, prompts: list[tuple[int, ...]], tokens: int) -> list[tuple[int, ...]]:
    """All of them at the same time, plainly."""

    def one(prompt: tuple[int, ...]) -> Any:
        return running.client.generate(
            prompt,
            {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True},
            speculation={"num_speculative_tokens": 0},
            timeout=HANG,
        ).token_ids

    with ThreadPoolExecutor(len(prompts)) as pool:
        return [tuple(ids) for ids in pool.map(one, prompts)]


def test_those_that_are_back_soon_share_a_pass(slow: RunningStack, oracle: Oracle) -> None:
    ids = oracle.encode(SOURCE)
    prompts = [ids[10 * i : 10 * i + 12 + i] for i in range(SEQUENCES)]
    generate(slow, prompts, 4)
    before = passes_of(slow)
    texts = generate(slow, prompts, 24)
    after = passes_of(slow)
    for prompt, text in zip(prompts, texts, strict=True):
        oracle.check_greedy(prompt, text, 24, ignore_eos=True)
    share = (after[1] - before[1]) / (after[0] - before[0])
    print(f"{share:.2f} of {SEQUENCES} sequences in a pass")
    assert share >= ALWAYS


def test_one_that_goes_away_is_not_waited_for(slow: RunningStack, oracle: Oracle) -> None:
    """Its client cancels between two rounds, or during one: the others go on."""
    ids = oracle.encode(SOURCE)
    leaving = slow.client.stream(
        ids[:20],
        {"temperature": 0.0, "max_tokens": 200, "ignore_eos": True},
        speculation={"num_speculative_tokens": 0},
        timeout=HANG,
    )
    next(leaving)
    with ThreadPoolExecutor(1) as pool:
        staying = pool.submit(generate, slow, [ids[30:44]], 12)
        next(leaving)
        leaving.close()
        (text,) = staying.result(HANG)
    oracle.check_greedy(ids[30:44], text, 12, ignore_eos=True)
