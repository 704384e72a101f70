"""A long prompt beside running streams is read in chunks between their rounds."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time

import pytest
from harness.oracle import Ids, Oracle
from harness.prompts import SOURCE
from harness.stacks import RunningStack
from harness.waiting import HANG, until

from paceline.core.errors import CancelledError

STREAMS = 8
LONG = 1500
TOKENS = 900
"""No stream ends while the prompt is read."""
ROUNDS = 10
"""Of each stream meanwhile, at least. There are some ninety; were as much read as fits a pass, three."""


class Reader:
    """Reads a stream in a thread of its own, and notes when chunks come."""

    def __init__(self, stack: RunningStack, prompt: Ids, k: int) -> None:
        sampling = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
        speculation = {"num_speculative_tokens": k}
        self.times: list[float] = []
        self.over = False
        self.stream = stack.client.stream(prompt, sampling, speculation=speculation, timeout=HANG)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(CancelledError):
            for _ in self.stream:
                self.times.append(time.monotonic())
            self.over = True

    def end(self) -> None:
        self.stream.close()
        self._thread.join(HANG)


@pytest.mark.parametrize("k", [0, 4])
def test_a_long_prompt_hardly_pauses_running_streams(stack: RunningStack, oracle: Oracle, k: int) -> None:
    ids = oracle.encode(SOURCE * 4)
    assert len(ids) >= LONG + 100
    readers = [Reader(stack, ids[20 * n : 20 * n + 30], k) for n in range(STREAMS)]
    until(lambda: all(len(reader.times) > ROUNDS for reader in readers), "rounds of all streams")
    before = [len(reader.times) for reader in readers]
    begun = time.monotonic()
    # Under a salt of its own nothing of it is cached.
    result = stack.client.generate(
        ids[:LONG], {"temperature": 0.0, "max_tokens": 1}, cache_salt=f"long {k}", timeout=HANG
    )
    ended = time.monotonic()
    meanwhile = [len(reader.times) - n for reader, n in zip(readers, before, strict=True)]
    running = [not reader.over for reader in readers]
    for reader in readers:
        reader.end()
    stack.check_pools_whole()
    gaps = [(b, b - a) for r in readers for a, b in zip(r.times, r.times[1:], strict=False)]
    during = [gap for at, gap in gaps if begun <= at <= ended]
    step = statistics.median(gap for at, gap in gaps if at < begun)
    print(
        f"K={k}: {LONG} tokens read in {ended - begun:.2f} s beside {STREAMS} streams; their pauses: "
        f"median {1e3 * step:.0f} ms before, {1e3 * statistics.median(during):.0f} ms meanwhile, "
        f"longest {1e3 * max(during):.0f} ms, {max(during) / step:.1f} steps; rounds meanwhile: {meanwhile}"
    )
    assert len(result.token_ids) == 1
    assert all(running)
    assert min(meanwhile) >= ROUNDS
