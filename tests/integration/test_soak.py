"""64 streams of all kinds for any time: every answer equals the one alone, and no process grows.

Runs for `PACELINE_SOAK_SECONDS` (10 unless set); docs/benchmarks-archive.md has a run of two minutes.
"""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness.oracle import Ids, Oracle
from harness.prompts import SOURCE
from harness.stacks import RunningStack, together
from harness.waiting import HANG

SECONDS = float(os.environ.get("PACELINE_SOAK_SECONDS", "10"))
STREAMS = 64
KINDS = 48
GROWTH = 0.05
"""Share by which a process may be larger at the end than half-way, when all of its cache was written to."""

pytestmark = [pytest.mark.full, pytest.mark.timeout(300 + 3 * SECONDS)]


@dataclass(frozen=True)
class Kind:
    """One request."""

    prompt: Ids
    sampling: dict[str, Any]
    k: int | str

    def run(self, stack: RunningStack) -> tuple[Ids, str, object]:
        """Its answer, streamed."""
        tokens: list[int] = []
        text = ""
        speculation = {"num_speculative_tokens": self.k}
        for chunk in (
            stream := stack.client.stream(self.prompt, self.sampling, speculation=speculation, timeout=HANG)
        ):
            assert chunk.index == len(tokens)
            tokens.extend(chunk.token_ids)
            text += chunk.text
        return tuple(tokens), text, stream.result.finish_reason


def kinds(oracle: Oracle) -> list[Kind]:
    """Prompts of 1 to 300 tokens, answers of 2 to 80, every parameter that shapes a distribution."""
    rng = random.Random(3)
    ids = oracle.encode(SOURCE)
    shapes: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 50},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
        {"temperature": 0.7, "logit_bias": {5: 2.0, 9: -100.0}, "min_tokens": 1},
        {"temperature": 1.0, "stop": ["return", "\n\n"], "logprobs": 2},
        {"temperature": 0.6, "bad_words": ["self"], "stop_token_ids": [13]},
    ]
    found = []
    for i in range(KINDS):
        length = rng.choice([1, 7, 40, 120, 300])
        start = rng.randrange(len(ids) - length)
        sampling = shapes[i % len(shapes)] | {"seed": i, "max_tokens": rng.choice([2, 8, 25, 50, 80])}
        found.append(Kind(ids[start : start + length], sampling, rng.choice([0, 1, 3, 5, 8, "auto"])))
    return found


def resident_bytes(pid: int) -> int:
    """What the process holds in memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def test_64_mixed_streams_run_for_long_without_leaks(deterministic: RunningStack, oracle: Oracle) -> None:
    stack = deterministic
    wanted = kinds(oracle)
    alone = [kind.run(stack) for kind in wanted]
    assert together([lambda kind=kind: kind.run(stack) for kind in wanted], at_once=STREAMS) == alone
    status = stack.client.status()
    pids = [status.coordinator.process_id] + [w.info.process_id for w in status.workers if w.info]
    answered = 0
    count = threading.Lock()

    def client(number: int, until: float) -> None:
        nonlocal answered
        rng = random.Random(number + int(until))
        while time.monotonic() < until:
            which = rng.randrange(KINDS)
            assert wanted[which].run(stack) == alone[which], wanted[which]
            with count:
                answered += 1

    sizes = []
    for _ in range(2):
        until = time.monotonic() + SECONDS / 2
        together(
            [lambda number=n, until=until: client(number, until) for n in range(STREAMS)], at_once=STREAMS
        )
        stack.check_pools_whole()
        sizes.append({pid: resident_bytes(pid) for pid in pids})
    growth = {pid: sizes[1][pid] / sizes[0][pid] - 1 for pid in pids}
    print(f"{answered} answers in {SECONDS:.0f} s; growth of the processes {growth}")
    assert max(growth.values()) < GROWTH, sizes
    assert {w.info.process_id for w in stack.client.status().workers if w.info} <= set(pids)
