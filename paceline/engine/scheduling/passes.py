"""One pass of the model over the ready work, and the handling of failures.

Both workers turn their commands into jobs: tokens to feed at the end of a sequence, and the number of last
rows whose logits are wanted. Prefill, decode and verification differ only in those two.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from paceline.core.clock import Clock
from paceline.core.errors import InternalError, PacelineError, ResourceExhaustedError
from paceline.core.types import Timings
from paceline.engine.device import ensure_alive
from paceline.engine.layout import SequenceInput
from paceline.engine.scheduling.planner import Chunk, Feed, plan_pass
from paceline.engine.scheduling.preemption import Need, make_room
from paceline.engine.scheduling.sequences import RETRY_SECONDS, HeldSequence, HeldSequences
from paceline.engine.state.interface import SequenceStates
from paceline.kv.table import BlockTable
from paceline.telemetry.logs import fields
from paceline.telemetry.worker import Passes

log = logging.getLogger(__name__)


class PassRunner(Protocol):
    """The part of a model runner that a worker's passes use."""

    def forward(self, inputs: Sequence[SequenceInput]) -> torch.Tensor:
        """float32 logits [rows wanted, vocabulary], in the order of the inputs."""

    def new_states(self, *, prefix_cache: bool) -> SequenceStates:
        """The states of the worker's sequences; with `prefix_cache`, later ones reuse those of ended ones."""

    def new_table(self) -> BlockTable:
        """An empty table of the runner's pool."""


@dataclass(slots=True)
class Job:
    """The tokens of one sequence that are still to be fed."""

    held: HeldSequence[Any]
    feed: list[int]
    rows: int
    arrived: float
    scored: bool = False
    """True if the logits of all other rows are wanted as well, as soon as they are computed."""
    parents: tuple[int, ...] = ()
    """If not empty, the last tokens are the nodes of a tree, whose rows are among those wanted."""
    offset: int = 0
    reused: int = 0
    """Number of entries from the prefix cache; none for a scored feed, which needs every row."""
    started: float | None = None
    compute: float = 0.0
    rows_in_pass: int = 0
    sequences_in_pass: int = 0
    prefill: float = 0.0
    prefill_in_pass: int = 0
    prefill_before: int = 0
    """Number of prompt rows that it waited for before its first pass."""

    @property
    def sequence_id(self) -> str:
        """The sequence of the job."""
        return self.held.session.sequence_id

    @property
    def remaining(self) -> int:
        """Number of tokens not fed yet."""
        return len(self.feed) - self.offset

    @property
    def begins(self) -> bool:
        """True while its sequence has no entries except those that this job took from the prefix cache."""
        return self.started is None and self.held.num_computed_tokens == self.reused

    def reuse(self) -> None:
        """Skip tokens that the prefix cache has, but no rows whose logits are wanted."""
        if self.begins and not self.scored:
            found = self.held.reuse(len(self.feed) - self.rows)
            self.reused += found
            self.offset += found

    def feed_next(self, token_ids: list[int], rows: int) -> None:
        """Continue with another feed; the timings continue as well."""
        self.feed, self.rows, self.offset = token_ids, rows, 0

    def next_input(self, chunk: Chunk) -> SequenceInput:
        """What a chunk feeds. A tree is part of the final one, as are all rows wanted at the end."""
        token_ids = self.feed[self.offset : self.offset + chunk.count]
        wanted = chunk.count if self.scored else self.rows if chunk.final else 0
        return SequenceInput(self.held.table, token_ids, wanted, self.parents if chunk.final else ())

    def compute_again(self, proposed: Sequence[int]) -> None:
        """Restart its feed without the prefix cache."""
        self.reused = 0
        self.feed_next([*self.held.session.tokens[self.held.num_computed_tokens :], *proposed], self.rows)

    def ran(
        self, begun: float, seconds: float, rows: int, sequences: int, own_prefill: int = 0, prefill: int = 0
    ) -> None:
        """Record its part of a pass over `rows` rows and `sequences` sequences.

        Of these rows, `prefill` had logits that were not wanted, and `own_prefill` of those were its own.
        """
        if self.started is None:
            self.started = begun
        self.compute += seconds
        if own_prefill:
            self.prefill += seconds * own_prefill / rows
        self.rows_in_pass, self.sequences_in_pass, self.prefill_in_pass = rows, sequences, prefill

    def timings(self) -> Timings:
        """Queue and compute time until now."""
        started = self.arrived if self.started is None else self.started
        return Timings(
            queue=started - self.arrived,
            compute=self.compute,
            rows=self.rows_in_pass,
            sequences=self.sequences_in_pass,
            prefill=self.prefill,
            prefill_rows=self.prefill_in_pass,
            prefill_rows_before=self.prefill_before,
            cached_tokens=self.reused,
        )


class HasJob(Protocol):
    """A round of a worker."""

    @property
    def job(self) -> Job:
        """The feed of the round."""


RoundT = TypeVar("RoundT", bound=HasJob)
Told = TypeVar("Told")


@dataclass(frozen=True, slots=True)
class Scored:
    """Logits of part of a scored feed: float [rows, vocabulary], the first after its token `offset`."""

    job: Job
    offset: int
    logits: torch.Tensor


@dataclass(slots=True)
class PassResult:
    """The result of one pass: jobs whose wanted rows are computed, and jobs that failed."""

    finished: list[Job] = field(default_factory=list)
    logits: torch.Tensor | None = None
    """[sum of the finished jobs' rows, vocabulary], in order."""
    scored: list[Scored] = field(default_factory=list)
    """Excludes jobs that failed."""
    failed: list[tuple[Job, PacelineError]] = field(default_factory=list)


def run_pass(
    jobs: Sequence[Job],
    runner: PassRunner,
    budget: int,
    clock: Clock,
    sequences: HeldSequences[Any],
    spare: Callable[[], bool] = lambda: False,
    beside: int | None = None,
    passes: Passes | None = None,
) -> PassResult:
    """Plan and run one pass over `jobs` (in order of arrival).

    `sequences`: all sequences of the worker. `spare` releases blocks of less value than those of any
    sequence; False if there were none. `beside`: maximum rows of prefill in a pass that other sequences wait
    for, including sequences between two rounds, whose next round may arrive during the pass. `passes` records
    the pass.
    """
    result = PassResult()
    by_id = {job.sequence_id: job for job in jobs}
    for job in jobs:
        job.reuse()
    feeds = [Feed(job.sequence_id, job.remaining, job.rows, job.scored) for job in jobs]
    alone = all(feed.remaining > feed.rows for feed in feeds) and len(sequences) == len(feeds)
    plan = plan_pass(feeds, budget, None if alone else beside)
    planned = [(by_id[chunk.sequence_id], chunk) for chunk in plan]
    chunks = _with_room(planned, jobs, sequences, spare, result)
    if not chunks:
        return result
    begun = clock()
    for job, _ in chunks:
        if job.started is None:
            _count_lookup(job, sequences)
            job.started = begun
    done, failed = chunks, False
    try:
        result.logits = _forward(chunks, runner, result)
    except Exception:
        log.exception("a pass over %d sequences failed; running them one by one", len(chunks))
        failed = True
    if failed:
        # Not inside the exception handler: the traceback keeps the tensors of the pass, so a pass that ran
        # out of memory would still hold it.
        done, result.logits = _forward_one_by_one(chunks, runner, result)
    ended = clock()
    spent = ended - begun
    rows = sum(chunk.count for _, chunk in done)
    if passes is not None:
        passes.ran(rows, len(done), spent)
    prefills = [chunk.count - (job.rows if chunk.final else 0) for job, chunk in done]
    sequences.passed(begun, ended, sum(prefills))
    for (job, chunk), own_prefill in zip(done, prefills, strict=True):
        job.ran(begun, spent, rows, len(done), own_prefill, sum(prefills))
        if chunk.final:
            result.finished.append(job)
    return result


def _with_room(
    chunks: list[tuple[Job, Chunk]],
    jobs: Sequence[Job],
    sequences: HeldSequences[Any],
    spare: Callable[[], bool],
    result: PassResult,
) -> list[tuple[Job, Chunk]]:
    """Mark sequences that have to wait for blocks as failed, and leave them out (preemption.py)."""
    needs = [Need(job.held, chunk.count, job.remaining if job.begins else 0) for job, chunk in chunks]
    beginning = {id(job.held) for job in jobs if job.begins}
    preempted = {id(held) for held in make_room(needs, sequences, spare)}
    if not preempted:
        return chunks
    sequences.num_preemptions += len(preempted - beginning)
    left = [(job, chunk) for job, chunk in chunks if id(job.held) not in preempted]
    others = bool(left) or any(held.table.blocks for held in sequences if id(held) not in preempted)
    message = "the cache has no free blocks except those of older sequences"
    error = ResourceExhaustedError(message, RETRY_SECONDS if others else None)
    result.failed += [(job, error) for job in jobs if id(job.held) in preempted]
    return left


def _count_lookup(job: Job, sequences: HeldSequences[Any]) -> None:
    """Count the lookup once each time a sequence begins. A feed's last row is always computed."""
    if sequences.prefix_index is not None and job.begins and not job.scored:
        sequences.prefix_index.queries += len(job.feed) - job.rows + 1
        sequences.prefix_index.hits += job.reused


def _forward(chunks: list[tuple[Job, Chunk]], runner: PassRunner, result: PassResult) -> torch.Tensor:
    """The logits of the final chunks' rows. Logits of scored rows go to `result` if nothing fails."""
    inputs = [job.next_input(chunk) for job, chunk in chunks]
    scored: list[Scored] = []
    logits = runner.forward(inputs)
    if any(job.scored for job, _ in chunks):
        logits, scored = _without_scored(chunks, inputs, logits)
    for (job, chunk), fed in zip(chunks, inputs, strict=True):
        job.offset += chunk.count
        job.held.fed(fed.entries)
    result.scored += scored
    return logits


def _without_scored(
    chunks: list[tuple[Job, Chunk]], inputs: list[SequenceInput], logits: torch.Tensor
) -> tuple[torch.Tensor, list[Scored]]:
    kept: list[torch.Tensor] = []
    scored: list[Scored] = []
    row = 0
    for (job, chunk), item in zip(chunks, inputs, strict=True):
        end = row + item.num_logits
        first = end - (job.rows if chunk.final else 0)
        kept.append(logits[first:end])
        if first > row:
            scored.append(Scored(job, job.offset, logits[row:first]))
        row = end
    return torch.cat(kept), scored


def _forward_one_by_one(
    chunks: list[tuple[Job, Chunk]], runner: PassRunner, result: PassResult
) -> tuple[list[tuple[Job, Chunk]], torch.Tensor | None]:
    """Run the chunks one by one, so that one sequence's failure ends only that sequence."""
    done: list[tuple[Job, Chunk]] = []
    logits: list[torch.Tensor] = []
    for job, chunk in chunks:
        # A pass that failed halfway has not committed: only whole passes count.
        job.held.cut_to(len(job.held.session.cached))
        try:
            part = _forward([(job, chunk)], runner, result)
        except Exception as error:
            result.failed.append((job, own_error(error, "the model", job.sequence_id)))
        else:
            done.append((job, chunk))
            if chunk.final:
                logits.append(part)
    return done, torch.cat(logits) if logits else None


def together_or_alone(
    rounds: Sequence[RoundT],
    logits: torch.Tensor,
    rows: Sequence[int],
    decide: Callable[[Sequence[RoundT], torch.Tensor], Sequence[Told]],
    what: str,
) -> list[Told | PacelineError]:
    """The results of `decide` for all rounds together, or for each alone if the joint call fails.

    Args:
        rounds: the rounds that share `logits`.
        logits: [sum of `rows`, vocabulary], each round's in order.
        rows: number of rows of each round.
        decide: gives one result for each of some rounds, from their logits; it may be called again.
        what: its name in the log and in errors.

    Returns:
        The result of each round, or the error of a round that fails alone.

    Raises the error of a device that can no longer compute.
    """
    if len(rounds) > 1:
        try:
            return [*decide(rounds, logits)]
        except Exception:
            log.exception("%s failed for %d sequences together; continuing one by one", what, len(rounds))
    told: list[Told | PacelineError] = []
    for r, own in zip(rounds, torch.split(logits, list(rows)), strict=True):
        try:
            told.extend(decide([r], own))
        except Exception as error:
            told.append(own_error(error, what, r.job.sequence_id))
    return told


def own_error(error: Exception, what: str, sequence_id: str) -> PacelineError:
    """The error to report for one sequence's failure. An unexpected error appears only in the log.

    Raises the error of a device that can no longer compute, which is not a failure of a single sequence.
    """
    if isinstance(error, PacelineError):
        return error
    log.error("%s failed for one sequence", what, exc_info=error, extra=fields(sequence_id=sequence_id))
    ensure_alive()
    return InternalError(f"{what} failed")


def broken_rows(logits: torch.Tensor) -> list[bool]:
    """True for rows with NaN, or with infinities that leave no distribution. logits: [R, V]."""
    if math.isfinite(logits.sum().item()):
        return [False] * len(logits)
    return [not usable for usable in usable_rows(*row_checks(logits))]


def row_checks(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest number and the sum of each row of [R, V], from which `usable_rows` tells broken ones."""
    return logits.amax(dim=-1), logits.sum(dim=-1)


def usable_rows(largest: torch.Tensor, sums: torch.Tensor) -> list[bool]:
    """True for rows that are a distribution's logits, from the `row_checks` of R rows."""
    pairs = zip(largest.tolist(), sums.tolist(), strict=True)
    return [math.isfinite(most) and not math.isnan(total) for most, total in pairs]
