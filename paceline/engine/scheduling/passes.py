"""One pass of the model over the work that is ready, and what to do when it cannot run.

Both workers turn their commands into jobs: tokens to feed at the end of a sequence, and how many of
the last rows' logits are wanted. Prefill, decode and verification differ only in those two.
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
    """What a worker's passes need of the model."""

    def forward(self, inputs: Sequence[SequenceInput]) -> torch.Tensor:
        """float32 logits [rows wanted, vocabulary], in the order of the inputs."""

    def new_states(self, *, prefix_cache: bool) -> SequenceStates:
        """The states of the worker's sequences; with `prefix_cache` ended ones leave theirs to later ones."""

    def new_table(self) -> BlockTable:
        """An empty table of the runner's pool."""


@dataclass(slots=True)
class Job:
    """One sequence's outstanding feed."""

    held: HeldSequence[Any]
    feed: list[int]
    rows: int
    arrived: float
    scored: bool = False
    """The logits of all other rows are wanted as well, as soon as they are there."""
    offset: int = 0
    reused: int = 0
    """Entries that came from the prefix cache; none of a scored feed, which wants every row."""
    started: float | None = None
    compute: float = 0.0
    rows_in_pass: int = 0
    sequences_in_pass: int = 0
    prefill: float = 0.0
    prefill_in_pass: int = 0
    prefill_before: int = 0
    """Rows of prompts that it waited for until its first pass."""

    @property
    def sequence_id(self) -> str:
        """The sequence it belongs to."""
        return self.held.session.sequence_id

    @property
    def remaining(self) -> int:
        """Tokens not fed yet."""
        return len(self.feed) - self.offset

    @property
    def begins(self) -> bool:
        """True while its sequence has no entries but those that came from the prefix cache for this job."""
        return self.started is None and self.held.table.length == self.reused

    def reuse(self) -> None:
        """Leave out what the prefix cache has, short of the rows whose logits are wanted."""
        if self.begins and not self.scored:
            found = self.held.reuse(len(self.feed) - self.rows)
            self.reused += found
            self.offset += found

    def feed_next(self, token_ids: list[int], rows: int) -> None:
        """Go on with another feed; the timings go on as well."""
        self.feed, self.rows, self.offset = token_ids, rows, 0

    def compute_again(self, proposed: Sequence[int]) -> None:
        """Begin its feed once more, without anything of the prefix cache."""
        self.reused = 0
        self.feed_next([*self.held.session.tokens[self.held.table.length :], *proposed], self.rows)

    def ran(
        self, begun: float, seconds: float, rows: int, sequences: int, own_prefill: int = 0, prefill: int = 0
    ) -> None:
        """Its part of a pass over so many rows and sequences is done.

        Of these rows `prefill` had logits that nobody wanted, and `own_prefill` of them were its own.
        """
        if self.started is None:
            self.started = begun
        self.compute += seconds
        if own_prefill:
            self.prefill += seconds * own_prefill / rows
        self.rows_in_pass, self.sequences_in_pass, self.prefill_in_pass = rows, sequences, prefill

    def timings(self) -> Timings:
        """Queue and compute time up to now."""
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
        """Its feed."""


RoundT = TypeVar("RoundT", bound=HasJob)
Told = TypeVar("Told")


@dataclass(frozen=True, slots=True)
class Scored:
    """Logits of a part of a scored feed: float [rows, vocabulary], the first after token `offset` of it."""

    job: Job
    offset: int
    logits: torch.Tensor


@dataclass(slots=True)
class PassResult:
    """What one pass did: jobs whose wanted rows are there, and jobs that cannot go on."""

    finished: list[Job] = field(default_factory=list)
    logits: torch.Tensor | None = None
    """[sum of the finished jobs' rows, vocabulary], in order."""
    scored: list[Scored] = field(default_factory=list)
    """Of no job that failed."""
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

    `sequences`: all sequences of the worker. `spare` gives back blocks that are worth less than those of any
    sequence; False when there were none. `beside`: rows of prefill in a pass that others wait for. So do
    the sequences between two rounds, whose next one may arrive while the pass runs. `passes` is told of it.
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
        # Not where the error is handled: its traceback keeps the tensors of the pass, and what failed for
        # want of memory would find that still taken.
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
    """Leave out, as failed, the sequences that have to wait for blocks (preemption.py)."""
    needs = [Need(job.held, chunk.count, job.remaining if job.begins else 0) for job, chunk in chunks]
    beginning = {id(job.held) for job in jobs if job.begins}
    preempted = {id(held) for held in make_room(needs, sequences, spare)}
    if not preempted:
        return chunks
    sequences.num_preemptions += len(preempted - beginning)
    left = [(job, chunk) for job, chunk in chunks if id(job.held) not in preempted]
    others = bool(left) or any(held.table.blocks for held in sequences if id(held) not in preempted)
    message = "the cache has no free blocks beside those of older sequences"
    error = ResourceExhaustedError(message, RETRY_SECONDS if others else None)
    result.failed += [(job, error) for job in jobs if id(job.held) in preempted]
    return left


def _count_lookup(job: Job, sequences: HeldSequences[Any]) -> None:
    """Once for each time that a sequence begins; the row of a feed's last token is always computed."""
    if sequences.prefix_index is not None and job.begins and not job.scored:
        sequences.prefix_index.queries += len(job.feed) - job.rows + 1
        sequences.prefix_index.hits += job.reused


def _forward(chunks: list[tuple[Job, Chunk]], runner: PassRunner, result: PassResult) -> torch.Tensor:
    """The logits of the final chunks' rows; those of scored rows go to `result`, where nothing fails."""
    inputs = []
    scored: list[Scored] = []
    for job, chunk in chunks:
        token_ids = job.feed[job.offset : job.offset + chunk.count]
        wanted = chunk.count if job.scored else job.rows if chunk.final else 0
        inputs.append(SequenceInput(job.held.table, token_ids, wanted))
    logits = runner.forward(inputs)
    if any(job.scored for job, _ in chunks):
        logits, scored = _without_scored(chunks, inputs, logits)
    for (job, chunk), fed in zip(chunks, inputs, strict=True):
        job.offset += chunk.count
        job.held.fed(list(fed.token_ids))
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
    """One sequence's failure must end that sequence and no other: find out whose it is."""
    done: list[tuple[Job, Chunk]] = []
    logits: list[torch.Tensor] = []
    for job, chunk in chunks:
        # A pass that failed half-way may have committed nothing: only whole passes count.
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
    """What `decide` says of each round; of each by itself where it fails for all of them together.

    Args:
        rounds: those that share `logits`.
        logits: [sum of `rows`, vocabulary], each round's in order.
        rows: of each round.
        decide: says one thing of each of some rounds, from their logits; it may be asked again.
        what: its name in the log and in errors.

    Returns:
        What it says, or the error of a round for which it fails alone.

    Raises what a device raises that can compute no more.
    """
    if len(rounds) > 1:
        try:
            return [*decide(rounds, logits)]
        except Exception:
            log.exception("%s failed for %d sequences together; going on one by one", what, len(rounds))
    told: list[Told | PacelineError] = []
    for r, own in zip(rounds, torch.split(logits, list(rows)), strict=True):
        try:
            told.extend(decide([r], own))
        except Exception as error:
            told.append(own_error(error, what, r.job.sequence_id))
    return told


def own_error(error: Exception, what: str, sequence_id: str) -> PacelineError:
    """What one sequence's failure is told as; what nobody raised on purpose is for the log alone.

    Raises what a device raises that can compute no more: then it is no single sequence's failure.
    """
    if isinstance(error, PacelineError):
        return error
    log.error("%s failed for one sequence", what, exc_info=error, extra=fields(sequence_id=sequence_id))
    ensure_alive()
    return InternalError(f"{what} failed")


def broken_rows(logits: torch.Tensor) -> list[bool]:
    """Which rows hold NaN, or infinities that leave no distribution. logits: [R, V]."""
    if math.isfinite(logits.sum().item()):
        return [False] * len(logits)
    return [not row for row in usable_rows(logits).tolist()]


def usable_rows(logits: torch.Tensor) -> torch.Tensor:
    """bool [R]: the rows of [R, V] that are a distribution's logits."""
    return torch.isfinite(logits.amax(dim=-1)) & ~torch.isnan(logits.sum(dim=-1))
