"""A periodic log line: sequences that run and wait, tokens per second, acceptance, cache use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self

from coordinator.scheduling.dispatcher import Dispatcher
from coordinator.telemetry.metrics import Metrics
from coordinator.workers.links import Link
from paceline.core.clock import monotonic
from paceline.telemetry import logs

log = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 1.0
"""Time limit for workers to report their cache use; later ones are left out of the line."""


@dataclass(frozen=True, slots=True)
class CounterSnapshot:
    """Counts at one time, which is in seconds."""

    at: float
    prompt_tokens: int
    generation_tokens: int
    rounds: int
    drafts: int
    draft_tokens: int
    accepted_tokens: int

    @classmethod
    def of(cls, metrics: Metrics, now: float) -> Self:
        """The current counts."""
        return cls(
            now,
            metrics.prompt_tokens,
            metrics.generation_tokens,
            metrics.rounds,
            metrics.num_drafts,
            metrics.num_draft_tokens,
            metrics.num_accepted_tokens,
        )

    def since(self, before: CounterSnapshot) -> dict[str, float]:
        """Rates between two snapshots. Rates of proposals are left out if there were none."""
        seconds = max(self.at - before.at, 1e-9)
        rates: dict[str, float] = {
            "prompt_tokens_per_s": round((self.prompt_tokens - before.prompt_tokens) / seconds, 1),
            "generation_tokens_per_s": round(
                (self.generation_tokens - before.generation_tokens) / seconds, 1
            ),
        }
        drafts, drafted = self.drafts - before.drafts, self.draft_tokens - before.draft_tokens
        accepted = self.accepted_tokens - before.accepted_tokens
        if drafts and drafted:
            rates["acceptance_rate"] = round(accepted / drafted, 3)
            # A round without a proposal has one token.
            more = self.generation_tokens - before.generation_tokens - (self.rounds - before.rounds)
            rates["mean_acceptance_length"] = round(1 + more / drafts, 2)
        return rates


class Served(Protocol):
    """The data of the log line, all of which a coordinator has."""

    metrics: Metrics
    dispatcher: Dispatcher

    @property
    def links(self) -> Sequence[Link]:
        """One link for each worker."""


class Throughput:
    """Writes the log line if anything ran since the previous one."""

    def __init__(self, coordinator: Served, now: float) -> None:
        self._coordinator = coordinator
        self._before = CounterSnapshot.of(coordinator.metrics, now)

    async def write(self, now: float) -> None:
        """Write one line of level INFO, or none."""
        coordinator = self._coordinator
        before, self._before = self._before, CounterSnapshot.of(coordinator.metrics, now)
        running, waiting = coordinator.dispatcher.running, coordinator.dispatcher.waiting
        moved = (self._before.prompt_tokens, self._before.generation_tokens) != (
            before.prompt_tokens,
            before.generation_tokens,
        )
        if not (moved or running or waiting):
            return
        about: dict[str, Any] = {"running": running, "waiting": waiting, **self._before.since(before)}
        log.info("throughput", extra=logs.fields(**about, **await _caches(coordinator.links)))


async def _caches(links: Sequence[Link]) -> Mapping[str, float]:
    """The share in use of the fullest cache of each role, by field name."""
    ready = [link for link in links if link.ready]
    asking = {asyncio.create_task(link.refresh()): link for link in ready}
    if not asking:
        return {}
    answered, late = await asyncio.wait(asking, timeout=ANSWER_SECONDS)
    for task in late:
        task.cancel()
    usage: dict[str, float] = {}
    for task in answered:
        info = None if task.exception() is not None else task.result()
        if info is not None and info.cache.total_blocks:
            name = f"{asking[task].role}_cache_usage"
            used = round(1 - info.cache.free_blocks / info.cache.total_blocks, 3)
            usage[name] = max(usage.get(name, 0.0), used)
    return dict(sorted(usage.items(), reverse=True))


async def tell_throughput(coordinator: Served, seconds: float) -> None:
    """Write the log line every `seconds` until cancelled; 0 turns it off.

    A failure is logged and does not stop later lines.
    """
    throughput = Throughput(coordinator, monotonic())
    while seconds:
        await asyncio.sleep(seconds)
        try:
            await throughput.write(monotonic())
        except Exception:
            log.exception("cannot report the throughput")
