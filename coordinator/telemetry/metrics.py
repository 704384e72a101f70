"""Counts what observers are notified of; `/metrics` reads the counts. Pure.

A round costs a few additions: no label lookups and no locks.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from coordinator.requests.observer import RequestRecord
from coordinator.sequence.round_record import PROMPT_LOOKUP, RoundRecord
from coordinator.sequence.stats import by_source
from paceline.core import limits
from paceline.core.errors import CancelledError, StaleEpochError
from paceline.rpc.codec.status import code_name
from paceline.telemetry import histogram
from paceline.telemetry.histogram import Histogram

if TYPE_CHECKING:
    from coordinator.scheduling.running_sequence import Running

PHASES = ("queue", "prefill", "draft", "verify", "wire", "commit")
"""Parts of a round, described in docs/observability.md."""
ABORT = "abort"
"""Finish reason of a sequence whose client went away, as in vLLM."""


class Metrics:
    """An observer that counts."""

    def __init__(self) -> None:
        fast = histogram.FAST_SECONDS
        self.phases = {phase: Histogram(fast) for phase in PHASES}
        self.round_seconds = Histogram(fast)
        # Looked up once, because every round uses them.
        self._queue, self._prefill, self._draft, self._verify, self._wire, self._commit = (
            self.phases[phase] for phase in PHASES
        )
        self.rounds = 0
        self.lookahead_hits = 0
        self.by_source = by_source()
        """Rounds with a proposal, by the name of its source."""
        self.rounds_by_draft = [0] * (limits.MAX_TREE_NODES + 1)
        """Entry i: rounds with i draft tokens."""
        self.accepted_lengths = [0] * (limits.MAX_SPECULATIVE_TOKENS + 1)
        """Entry i: rounds with a proposal of which exactly i tokens were accepted."""
        self.accepted_ranks: Counter[int] = Counter()
        """Draft tokens that were accepted, by their place among their siblings."""
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.first_token = Histogram(histogram.FIRST_TOKEN_SECONDS)
        self.inter_token = Histogram(histogram.TOKEN_SECONDS)
        self.request_seconds = {
            part: Histogram(histogram.REQUEST_SECONDS)
            for part in ("e2e", "queue", "prefill", "decode", "inference")
        }
        self.token_seconds = Histogram(histogram.TOKEN_SECONDS)
        self.request_prompt_tokens = Histogram(histogram.TOKENS)
        self.request_generation_tokens = Histogram(histogram.TOKENS)
        self.params_n = Histogram((1, 2, 5, 10, 20))
        self.params_max_tokens = Histogram(histogram.TOKENS)
        self.finished: Counter[str] = Counter()
        """Sequences that were completed or abandoned, by finish reason."""
        self.failed: Counter[str] = Counter()
        """Requests that ended with an error, by gRPC code."""
        self.failovers: Counter[str] = Counter()
        self.block_waits = 0
        self.http_calls: Counter[tuple[str, str, str]] = Counter()
        """By method, route path and status."""
        self.grpc_calls: Counter[tuple[str, str]] = Counter()
        """By method and code."""

    def round_ended(self, running: Running, record: RoundRecord, now: float) -> None:
        """Count a round."""
        self.rounds += 1
        self.lookahead_hits += record.hit
        self.rounds_by_draft[record.num_draft] += 1
        if record.num_draft:
            self.accepted_lengths[record.num_accepted] += 1
            self.accepted_ranks.update(record.accepted_ranks)
            self.by_source[record.proposed_by].record(record)
        verify, waited = record.verify, record.verify_waited
        # A verification that the target began by itself was already running: only the time waited counts.
        spent = min(verify.compute, waited)
        (self._prefill if record.prefills else self._verify).observe(spent)
        queue = min(verify.queue, waited - spent)
        wire = waited - spent - queue
        draft = record.draft
        if draft is not None:
            drafted = min(draft.compute, record.draft_waited)
            self._draft.observe(drafted)
            queue += min(draft.queue, record.draft_waited - drafted)
            wire += max(0.0, record.draft_waited - drafted - draft.queue)
        self._queue.observe(queue)
        self._wire.observe(wire)
        self._commit.observe(now - record.ended)
        self.round_seconds.observe(now - record.began)
        self.generation_tokens += record.num_tokens
        last = running.last_token_at
        if last is None:
            self.prompt_tokens += running.state.ledger.prompt_length
            self.first_token.observe(record.ended - running.arrived_at)
        elif record.num_tokens:
            self.inter_token.observe_each((record.ended - last) / record.num_tokens, record.num_tokens)

    def sequence_ended(self, running: Running, now: float) -> None:
        """Count a sequence."""
        ledger = running.state.ledger
        if running.error is not None:
            return  # counted with its request
        self.finished[ABORT if ledger.finish is None else ledger.finish.reason.value] += 1
        first, last, admitted = running.first_token_at, running.last_token_at, running.admitted_at
        if ledger.finish is None or first is None or last is None or admitted is None:
            return
        parts = self.request_seconds
        parts["e2e"].observe(last - running.arrived_at)
        parts["queue"].observe(admitted - running.arrived_at)
        parts["prefill"].observe(first - admitted)
        parts["decode"].observe(last - first)
        parts["inference"].observe(last - admitted)
        generated = ledger.num_generated - running.received
        if generated > 1:
            self.token_seconds.observe((last - first) / (generated - 1))
        self.request_prompt_tokens.observe(ledger.prompt_length)
        self.request_generation_tokens.observe(generated)

    def request_began(self, request: RequestRecord) -> None:
        """Nothing is known of the request yet."""

    def request_ended(self, request: RequestRecord) -> None:
        """Count a request."""
        # A request that another call resumed has not failed: its client gets the answer from that call.
        if request.error is not None and not isinstance(request.error, CancelledError | StaleEpochError):
            self.failed[code_name(request.error)] += 1
        generation = request.generation
        # A call that resumes sequences arrived after them; they were counted with the first call.
        if generation is not None and generation.choices[0].arrived_at >= request.began:
            sampling = request.call.sampling
            self.params_n.observe(sampling.n)
            if sampling.max_tokens is not None:
                self.params_max_tokens.observe(sampling.max_tokens)

    def worker_lost(self, role: str) -> None:
        """Count a failover."""
        self.failovers[role] += 1

    def blocks_awaited(self) -> None:
        """Count a wait for blocks."""
        self.block_waits += 1

    # ---- read ------------------------------------------------------------------------------------

    @property
    def prompt_lookups(self) -> int:
        """Rounds whose proposal was copied from the sequence's own text."""
        return self.by_source[PROMPT_LOOKUP].num_rounds

    @property
    def num_drafts(self) -> int:
        """Rounds with a proposal."""
        return self.rounds - self.rounds_by_draft[0]

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens that were verified."""
        return sum(k * count for k, count in enumerate(self.rounds_by_draft))

    @property
    def num_accepted_tokens(self) -> int:
        """Draft tokens that were accepted."""
        return sum(a * count for a, count in enumerate(self.accepted_lengths))

    @property
    def accepted_at(self) -> list[int]:
        """Entry i: rounds whose draft token at position i was accepted."""
        result, longer = [], 0
        for count in reversed(self.accepted_lengths[1:]):
            longer += count
            result.append(longer)
        return result[::-1]

    @property
    def accepted_by_rank(self) -> list[int]:
        """Entry i: accepted draft tokens that were child i of their node. Merged trees may be wider than one
        drafter's."""
        widest = max([limits.MAX_TREE_WIDTH - 1, *self.accepted_ranks])
        return [self.accepted_ranks[rank] for rank in range(widest + 1)]
