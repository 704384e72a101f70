"""`/metrics` of the coordinator: vLLM's names under `paceline:`, and own names where vLLM has none.

docs/observability.md describes each metric. Values are computed only when they are read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from coordinator.app import Coordinator
from coordinator.proposers.registry import CONTEXT_SOURCES
from coordinator.sequence.round_record import DRAFT
from coordinator.telemetry.metrics import ABORT, PHASES, Metrics
from coordinator.telemetry.tenants import TenantMetrics
from coordinator.workers.links import Link, LinkState
from paceline.core.clock import Clock, monotonic
from paceline.core.types import FinishReason
from paceline.rpc.codec.info import model_or_drafter
from paceline.telemetry.exposition import Families
from paceline.telemetry.histogram import Histogram

log = logging.getLogger(__name__)

Value = TypeVar("Value", float, Histogram)

REFRESH_SECONDS = 1.0
"""Shortest interval between two queries of the workers, and the time limit of a query."""
WORKER_ROLES = ("target", "draft")
_WORKER = ("role", "worker", "worker_model")
"""Labels of one worker."""
TREE_NODES = (16, 32, 64)
"""Buckets for the nodes of trees, beyond those for each K."""
REASONS = (*(reason.value for reason in FinishReason), ABORT)
_REQUEST_PARTS = {
    "e2e": ("e2e_request_latency_seconds", "From a request's arrival to its last token."),
    "queue": ("request_queue_time_seconds", "From a request's arrival until it was admitted."),
    "prefill": ("request_prefill_time_seconds", "From admission to the first token."),
    "decode": ("request_decode_time_seconds", "From the first token to the last."),
    "inference": ("request_inference_time_seconds", "From admission to the last token."),
}
_CACHE_COUNTERS = {
    "prefix_cache_queries": "Tokens of sequences that begin, or begin again, looked up in a prefix cache.",
    "prefix_cache_hits": "Looked up tokens that were found there.",
    "num_preemptions": "Sequences that lost their blocks to others.",
}
"""Fields of CacheInfo that count from a worker's start, which are also the names of their metrics."""


class Workers:
    """Queries workers for their counts, at most once per interval."""

    def __init__(self, links: Callable[[], Sequence[Link]], clock: Clock = monotonic) -> None:
        """`links` returns the current links."""
        self._links = links
        self._clock = clock
        self._asked_at: float | None = None

    async def refresh(self) -> None:
        """Query all workers. A worker that does not answer in time keeps its previous counts."""
        now = self._clock()
        if self._asked_at is not None and now - self._asked_at < REFRESH_SECONDS:
            return
        self._asked_at = now
        asking = [asyncio.create_task(link.refresh()) for link in self._links()]
        if asking:
            done, late = await asyncio.wait(asking, timeout=REFRESH_SECONDS)
            for task in late:
                task.cancel()
            for task in done:
                if (error := task.exception()) is not None:
                    log.warning("cannot query a worker for its counts: %s", type(error).__name__)


class CoordinatorCollector(Collector):
    """All metrics of `/metrics` except those of the process itself."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def collect(self) -> Iterator[Metric]:
        """All metric families, including those without samples yet."""
        coordinator = self._coordinator
        make = Families({"model_name": coordinator.known_name})
        yield from self._requests(make, coordinator.metrics)
        yield from self._times(make, coordinator.metrics)
        yield from self._speculation(make, coordinator.metrics)
        yield from self._workers(make, coordinator.metrics)
        yield from self._cache(make)
        yield from self._calls(make, coordinator.metrics)
        yield make.certificate_expiry(coordinator.certificates.days_left())
        if coordinator.tenants is not None:
            yield from _by_tenant(make, coordinator.tenants)

    def _requests(self, make: Families, of: Metrics) -> Iterator[Metric]:
        dispatcher = self._coordinator.dispatcher
        yield make.gauge("num_requests_running", "Sequences that are generating.", _one(dispatcher.running))
        yield make.gauge("num_requests_waiting", "Sequences that are waiting.", _one(dispatcher.waiting))
        yield make.counter(
            "request_success",
            "Sequences that finished, or were abandoned by their client (abort).",
            [([reason], of.finished[reason]) for reason in REASONS],
            ["finished_reason"],
        )
        yield make.counter(
            "request_failure",
            "Requests that ended with an error, including refused ones.",
            [([code], count) for code, count in sorted(of.failed.items())],
            ["code"],
        )
        yield make.counter("prompt_tokens", "Prompt tokens of sequences that began.", _one(of.prompt_tokens))
        yield make.counter("generation_tokens", "Tokens that were committed.", _one(of.generation_tokens))
        for name, text, histogram in (
            ("request_prompt_tokens", "Prompt tokens of a sequence.", of.request_prompt_tokens),
            ("request_generation_tokens", "Tokens a sequence generated.", of.request_generation_tokens),
            ("request_params_n", "The parameter n.", of.params_n),
            ("request_params_max_tokens", "The parameter max_tokens.", of.params_max_tokens),
        ):
            yield make.histogram(name, text, _one(histogram))

    def _times(self, make: Families, of: Metrics) -> Iterator[Metric]:
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From a request's arrival to its first token.", of.first_token),
            ("inter_token_latency_seconds", "Time between two tokens of a sequence.", of.inter_token),
            (
                "request_time_per_output_token_seconds",
                "Mean time of a sequence's tokens after the first.",
                of.token_seconds,
            ),
            ("round_time_seconds", "A whole round.", of.round_seconds),
        ):
            yield make.histogram(name, text, _one(histogram))
        for part, (name, text) in _REQUEST_PARTS.items():
            yield make.histogram(name, text, _one(of.request_seconds[part]))
        yield make.histogram(
            "round_phase_time_seconds",
            "Parts of a round.",
            [([phase], of.phases[phase]) for phase in PHASES],
            ["phase"],
        )

    def _speculation(self, make: Families, of: Metrics) -> Iterator[Metric]:
        longest = max((k for k, count in enumerate(of.rounds_by_draft) if count), default=0)
        shown = max(longest, self._coordinator.config.max_num_speculative_tokens)
        for name, text, value in (
            ("rounds", "Rounds that were committed.", of.rounds),
            ("lookahead_hits", "Rounds whose proposal was ready when they began.", of.lookahead_hits),
            ("prompt_lookups", "Rounds whose proposal was copied from the text so far.", of.prompt_lookups),
            ("spec_decode_num_drafts", "Rounds with a proposal.", of.num_drafts),
            (
                "spec_decode_num_draft_tokens",
                "Verified draft tokens, including those after an end.",
                of.num_draft_tokens,
            ),
            ("spec_decode_num_accepted_tokens", "Draft tokens that were committed.", of.num_accepted_tokens),
        ):
            yield make.counter(name, text, _one(value))
        for name, text, field in (
            ("source_drafts", "Rounds with a proposal, by its source.", "num_rounds"),
            ("source_draft_tokens", "Draft tokens verified, by their source.", "num_draft_tokens"),
            (
                "source_accepted_tokens",
                "Draft tokens that were committed, by their source.",
                "num_accepted_draft_tokens",
            ),
        ):
            values = [
                ([source], getattr(of.by_source[source], field)) for source in (DRAFT, *CONTEXT_SOURCES)
            ]
            yield make.counter(name, text, values, ["source"])
        yield make.counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that were committed, by position in the proposal.",
            [([str(i)], count) for i, count in enumerate(of.accepted_at[:shown])],
            ["position"],
        )
        yield make.counter(
            "spec_decode_num_accepted_tokens_per_rank",
            "Draft tokens that were committed, by place among the children of their node.",
            [([str(rank)], count) for rank, count in enumerate(of.accepted_by_rank)],
            ["rank"],
        )
        chosen = Histogram((*range(shown + 1), *(nodes for nodes in TREE_NODES if nodes > shown)))
        for rows, count in enumerate(of.rounds_by_draft):
            chosen.observe_each(rows, count)
        yield make.histogram(
            "round_num_draft_tokens", "Draft tokens of a round: K, or a tree's nodes.", _one(chosen)
        )

    def _workers(self, make: Families, of: Metrics) -> Iterator[Metric]:
        links = self._coordinator.links
        yield make.gauge(
            "workers",
            "Workers of this coordinator, by role and state.",
            [
                ([role, state.value], sum(link.role == role and link.state is state for link in links))
                for role in WORKER_ROLES
                for state in LinkState
            ],
            ["role", "state"],
        )
        yield make.gauge(
            "worker_sequences",
            "Sequences of this coordinator on a worker.",
            [(_labels(link), link.load) for link in links],
            _WORKER,
        )
        yield make.counter(
            "failovers",
            "Sequences that lost their worker while they ran.",
            [([role], of.failovers[role]) for role in WORKER_ROLES],
            ["role"],
        )
        yield make.counter("block_waits", "Times a sequence waited for free blocks.", _one(of.block_waits))

    def _cache(self, make: Families) -> Iterator[Metric]:
        links = self._coordinator.links
        caches = [(_labels(link), link.known.cache) for link in links if link.known is not None]
        yield make.gauge(
            "kv_cache_usage_perc",
            "Share of a worker's KV cache in use, from 0 to 1.",
            [
                (labels, 1 - cache.free_blocks / cache.total_blocks)
                for labels, cache in caches
                if cache.total_blocks
            ],
            _WORKER,
        )
        yield make.gauge(
            "kv_cache_blocks",
            "Blocks of a worker's KV cache.",
            [(labels, cache.total_blocks) for labels, cache in caches],
            _WORKER,
        )
        for name, text in _CACHE_COUNTERS.items():
            values = [(labels, getattr(cache, name)) for labels, cache in caches]
            yield make.counter(name, text, values, _WORKER)

    def _calls(self, make: Families, of: Metrics) -> Iterator[Metric]:
        yield make.counter(
            "http_requests",
            "HTTP requests that ended.",
            [(labels, count) for labels, count in sorted(of.http_calls.items())],
            ["method", "handler", "status"],
        )
        yield make.counter(
            "grpc_requests",
            "gRPC calls of clients that ended.",
            [(labels, count) for labels, count in sorted(of.grpc_calls.items())],
            ["method", "code"],
        )


def _labels(link: Link) -> list[str]:
    """Values of `_WORKER`. The model is empty before the worker answers."""
    return [link.role, link.address, "" if link.known is None else model_or_drafter(link.known)]


def _by_tenant(make: Families, of: TenantMetrics) -> Iterator[Metric]:
    yield make.counter(
        "tenant_requests",
        "Requests that ended, by API key.",
        [(labels, count) for labels, count in sorted(of.requests.items())],
        ["tenant", "code"],
    )
    for name, text, counts in (
        ("tenant_prompt_tokens", "Prompt tokens of sequences that began, by API key.", of.prompt_tokens),
        ("tenant_generation_tokens", "Tokens that were committed, by API key.", of.generation_tokens),
    ):
        yield make.counter(name, text, [([tenant], n) for tenant, n in sorted(counts.items())], ["tenant"])


def _one(value: Value) -> list[tuple[tuple[str, ...], Value]]:
    """The only sample of a family without labels of its own."""
    return [((), value)]


def make_registry(coordinator: Coordinator) -> CollectorRegistry:
    """A separate registry, to which other collectors may be added."""
    registry = CollectorRegistry()
    registry.register(CoordinatorCollector(coordinator))
    ProcessCollector(registry=registry)
    return registry
