"""A long prompt among running streams: it is read in chunks between their rounds."""

from __future__ import annotations

import statistics
import threading
import time

import pytest
from harness.oracle import Ids, Oracle
from harness.prompts import SOURCE
from harness.stacks import RunningStack
from harness.waiting import HANG

STREAMS = 8
LONG = 1500
TOKENS = 160
FEW_STEPS = 25.0
"""The longest pause over the median one, on a machine that has other work; docs/benchmarks.md has what it is
on one that has none. One pass over the whole prompt takes about a hundred."""


@pytest.mark.parametrize("k", [0, 4])
def test_running_streams_hardly_pause(stack: RunningStack, oracle: Oracle, k: int) -> None:
    ids = oracle.encode(SOURCE * 4)
    assert len(ids) >= LONG + 100
    halfway = threading.Barrier(STREAMS + 1)
    gaps: list[list[tuple[float, float]]] = [[] for _ in range(STREAMS)]

    def stream(number: int) -> None:
        sampling = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
        prompt = ids[20 * number : 20 * number + 30]
        last, received, waited = 0.0, 0, False
        for chunk in stack.client.stream(
            prompt, sampling, speculation={"num_speculative_tokens": k}, timeout=HANG
        ):
            now = time.monotonic()
            if last:
                gaps[number].append((now, now - last))
            last = now
            received += len(chunk.token_ids)
            if received > TOKENS // 4 and not waited:
                waited = True
                halfway.wait(HANG)
                last = time.monotonic()

    threads = [threading.Thread(target=stream, args=(n,)) for n in range(STREAMS)]
    for thread in threads:
        thread.start()
    halfway.wait(HANG)
    begun = time.monotonic()
    # Under a salt of its own nothing of it is cached.
    result = stack.client.generate(
        ids[:LONG], {"temperature": 0.0, "max_tokens": 1}, cache_salt=f"long {k}", timeout=HANG
    )
    ended = time.monotonic()
    for thread in threads:
        thread.join()
    assert len(result.token_ids) == 1
    during = [gap for of_stream in gaps for at, gap in of_stream if begun <= at <= ended + 0.05]
    others = [gap for of_stream in gaps for at, gap in of_stream if not begun <= at <= ended + 0.05]
    step = statistics.median(others)
    print(
        f"K={k}: {LONG} tokens read in {ended - begun:.2f} s beside {STREAMS} streams; their pauses: "
        f"median {1e3 * step:.0f} ms without, {1e3 * statistics.median(during):.0f} ms with, "
        f"longest {1e3 * max(during):.0f} ms, {max(during) / step:.1f} steps"
    )
    assert len(during) >= STREAMS, "the streams stood still while the prompt was read"
    assert max(during) < FEW_STEPS * step


def test_the_prompt_is_long(oracle: Oracle) -> None:
    """Longer than a pass may be."""
    tokens: Ids = oracle.encode(SOURCE * 4)
    assert len(tokens) >= LONG
