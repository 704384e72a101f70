"""Sequences share passes where a pass takes longer than the way back to the next one."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator

import pytest
from harness.history import Recording
from harness.oracle import Oracle
from harness.pair import Pair
from harness.prompts import SOURCE
from harness.stacks import RunningStack, sound_stack
from harness.waiting import HANG
from prometheus_client.parser import text_string_to_metric_families

SEQUENCES = 4
TOKENS = 44
PASS_SECONDS = 0.06
"""Much more than the way to the coordinator and back takes, also on a busy machine."""
MOST = 3.0
"""Of four. With nobody waited for, those that began at different times take turns: 2.0."""


@pytest.fixture(scope="module")
def slow(pair_paths: Pair) -> Iterator[RunningStack]:
    target = {"least_pass_seconds": PASS_SECONDS}
    with sound_stack(pair_paths, log_format="json", target_metrics_port=0, target=target) as running:
        yield running


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


def plainly(running: RunningStack, prompt: tuple[int, ...], tokens: int) -> Recording:
    sampling = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
    return Recording(running.address, prompt, sampling, {"num_speculative_tokens": 0})


def test_those_that_are_back_soon_share_a_pass(slow: RunningStack, oracle: Oracle) -> None:
    """However they began: each when the one before it was on its way already."""
    ids = oracle.encode(SOURCE)
    prompts = [ids[10 * i : 10 * i + 12 + i] for i in range(SEQUENCES)]
    streams = []
    for prompt in prompts:
        streams.append(plainly(slow, prompt, TOKENS))
        streams[-1].wait_for_tokens(1)
    for stream in streams:
        stream.wait_for_tokens(6)
    before = passes_of(slow)
    streams[0].wait_for_tokens(TOKENS - 6)
    after = passes_of(slow)
    for prompt, stream in zip(prompts, streams, strict=True):
        oracle.check_greedy(prompt, stream.result().token_ids, TOKENS, ignore_eos=True)
    share = (after[1] - before[1]) / (after[0] - before[0])
    print(f"{share:.2f} of {SEQUENCES} sequences in a pass")
    assert share >= MOST


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
    staying = plainly(slow, ids[30:44], 12)
    next(leaving)
    leaving.close()
    oracle.check_greedy(ids[30:44], staying.result().token_ids, 12, ignore_eos=True)
