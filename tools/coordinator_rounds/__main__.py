"""Rounds a second of one coordinator: `python -m tools.coordinator_rounds [--json]`.

A real coordinator, workers that answer at once (instant.py) and clients that stream, all on this machine.
Each measurement has a number of sequences that run at the same time, without speculation (K = 0) or with K
draft tokens from the draft worker, all accepted.

The coordinator's event loop has one core, so what it carries is its rounds divided by its processor time. The
rounds a second of this machine are fewer where workers and clients share its cores. Of the repeats, the one
with the least processor time a round is told: other work on the machine can only add some.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Final

from paceline.client import AsyncClient, SamplingParams, SpeculationParams
from paceline.core.config import CoordinatorConfig, DraftConfig, TargetConfig
from paceline.supervisor import ChildSpec, Supervisor, arguments, discard

PROGRAM: Final = (sys.executable, "-m", "tools.coordinator_rounds.instant")
PROMPT: Final = [300, 301, 302, 303]
TOKENS: Final = 256
"""Of a request; then its client sends the next one."""
START_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class Rounds:
    """One measurement."""

    sequences: int
    k: int
    seconds: float
    rounds: int
    tokens: int
    processor_seconds: float
    """Of the coordinator, all threads together."""

    @property
    def carried(self) -> float:
        """Rounds a second of a coordinator that has a core to itself."""
        return self.rounds / self.processor_seconds


def measure(
    sequences: list[int], ks: list[int], seconds: float, repeats: int, *, local_sockets: bool
) -> list[Rounds]:
    """Measure every combination on one set of processes: of some repeats the one that carried the most."""
    with ExitStack() as stack:
        supervisor = stack.enter_context(Supervisor(sink=discard))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-"))
        own = {"model": "embedded:target", "threads": 1, "max_sequences": 1024, "exit_with_parent": True}
        configs = {
            role: config(**own, local_socket=f"{folder}/{role}" if local_sockets else "")
            for role, config in (("target", TargetConfig), ("draft", DraftConfig))
        }
        workers = [
            ChildSpec(role=role, command=(*PROGRAM, f"{role}-worker", *arguments(c)))
            for role, c in configs.items()
        ]
        target, draft = (status.address for status in supervisor.start(workers, START_SECONDS))
        config = CoordinatorConfig(
            targets=(target,),
            drafts=(draft,),
            tokenizer="embedded:target",
            sources="none",
            local_sockets=local_sockets,
            log_stats_seconds=0,
            exit_with_parent=True,
        )
        child = ChildSpec(role="coordinator", command=(*PROGRAM, "coordinator", *arguments(config)))
        (status,) = supervisor.start([child], START_SECONDS)
        found = [
            asyncio.run(_measured(status.address, status.http_address, count, k, seconds))
            for _ in range(repeats)
            for k in ks
            for count in sequences
        ]
    alike = [found[start :: len(ks) * len(sequences)] for start in range(len(ks) * len(sequences))]
    return [max(each, key=lambda rounds: rounds.carried) for each in alike]


async def _measured(address: str, http: str, count: int, k: int, seconds: float) -> Rounds:
    """`count` streams without a pause for `seconds`, after a second that does not count."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    speculation = SpeculationParams(num_speculative_tokens=k, drafter="draft" if k else None)
    over = asyncio.Event()

    async def stream(client: AsyncClient) -> None:
        while not over.is_set():
            async with client.stream(PROMPT, params, speculation=speculation) as chunks:
                async for _ in chunks:
                    pass

    async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(stream(client))
        await asyncio.sleep(1.0)
        before, begun = await asyncio.to_thread(_counters, http), time.monotonic()
        await asyncio.sleep(seconds)
        after, ended = await asyncio.to_thread(_counters, http), time.monotonic()
        over.set()
    rounds, tokens, processor = (late - early for late, early in zip(after, before, strict=True))
    return Rounds(count, k, ended - begun, int(rounds), int(tokens), processor)


def _counters(http: str) -> tuple[float, ...]:
    """The coordinator's rounds, tokens and processor seconds so far."""
    with urllib.request.urlopen(f"http://{http}/metrics") as answer:
        page = answer.read().decode()
    names = ("paceline:rounds_total", "paceline:generation_tokens_total", "process_cpu_seconds_total")
    return tuple(float(re.findall(rf"^{name}\S* (\S+)$", page, re.MULTILINE)[0]) for name in names)


def main() -> None:
    """Measure and write a row for each measurement."""
    parser = argparse.ArgumentParser(description="Rounds a second of one coordinator.")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--k", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--local-sockets", action="store_true", help="workers by Unix sockets, not by gRPC")
    parser.add_argument("--json", action="store_true", help="one JSON list")
    asked = parser.parse_args()
    found = measure(asked.sequences, asked.k, asked.seconds, asked.repeats, local_sockets=asked.local_sockets)
    if asked.json:
        json.dump([asdict(each) | {"carried": each.carried} for each in found], sys.stdout, indent=1)
        return
    print(f"{'K':>3}{'sequences':>11}{'rounds/s here':>15}{'tokens/s here':>15}{'rounds/s of a core':>20}")
    for each in found:
        rates = (each.rounds / each.seconds, each.tokens / each.seconds, each.carried)
        print(f"{each.k:3}{each.sequences:11}{rates[0]:15.0f}{rates[1]:15.0f}{rates[2]:20.0f}")


if __name__ == "__main__":
    main()
