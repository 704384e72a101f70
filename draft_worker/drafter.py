"""The draft worker without sockets and threads: rounds in, proposals out.

Each of the K steps is one pass over all drafting sequences, whatever step each one is at. A sequence's
prompt is prefilled by its first round, not before: prefill is lazy. After a full acceptance the entry of
dK is missing here, since the last draft token is never fed; the next round's feed includes it, because a
feed is always everything of the ledger that the cache lacks.

While no round wants a pass, branches are drafted for the likely outcomes of the verifications in
progress (ahead.py). A round that arrives goes first, at the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from draft_worker.ahead import Ahead
from draft_worker.drafting import Drafting
from draft_worker.fanout import MAX_RANK, FanOut
from draft_worker.propose import Drawn, NoiseTape, propose
from paceline.core.clock import Clock, monotonic
from paceline.core.config import WorkerConfig
from paceline.core.errors import (
    InternalError,
    InvalidArgumentError,
    PacelineError,
    ResourceExhaustedError,
)
from paceline.core.messages import (
    CloseSequence,
    DraftCommand,
    DraftEvent,
    DraftProposal,
    DraftRound,
    OpenSequence,
    SequenceFailed,
)
from paceline.core.types import Proposal
from paceline.engine import passes
from paceline.engine.holdings import Held, Holdings
from paceline.engine.passes import Job, broken_rows, run_pass
from paceline.engine.session import Disposition, round_digest
from paceline.kv.table import BlockTable
from paceline.rpc.codec import check_opening, check_token_ids


class Runner(passes.Runner, Protocol):
    """What drafting ahead needs of the model besides passes."""

    def fork(self, table: BlockTable) -> BlockTable:
        """A second sequence with the same entries. Raises ResourceExhaustedError."""


@dataclass(slots=True)
class _Round:
    """A proposal in progress."""

    command: DraftRound
    drafting: Drafting

    @property
    def job(self) -> Job:
        """Its outstanding feed."""
        return self.drafting.job


@dataclass(slots=True)
class LookaheadCounts:
    """How often the verdict was foreseen."""

    rounds: int = 0
    """Rounds that followed a verdict a branch could have foreseen."""
    hits: int = 0
    """Those for which a branch was there, finished or not."""


class Drafter:
    """Proposes tokens with the draft model. Not thread-safe: the engine thread owns it."""

    def __init__(
        self,
        runner: Runner,
        config: WorkerConfig,
        *,
        vocabulary_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int] = (),
        clock: Clock = monotonic,
    ) -> None:
        self._runner = runner
        self._config = config
        self._vocabulary_size = vocabulary_size
        self._max_model_len = max_model_len
        self._eos_token_ids = tuple(eos_token_ids)
        self._clock = clock
        self.holdings: Holdings[DraftProposal] = Holdings(
            runner.new_table, config.max_sequences, clock, config.lease_seconds
        )
        self._rounds: dict[str, _Round] = {}
        self._aheads: dict[str, Ahead] = {}
        self._fan_out = FanOut()
        self.lookahead = LookaheadCounts()

    @property
    def has_work(self) -> bool:
        """True while a round lacks draft tokens, or a branch does."""
        return bool(self._rounds) or any(ahead.unfinished() for ahead in self._aheads.values())

    def holds(self, sequence_id: str) -> bool:
        """True while the sequence has state here."""
        return sequence_id in self.holdings

    def handle(self, command: DraftCommand, arrived: float) -> list[DraftEvent]:
        """Take a command up. A refusal, or the answer to a repeated round, comes back at once."""
        try:
            match command:
                case OpenSequence():
                    self._open(command)
                case DraftRound():
                    return self._begin(command, arrived)
                case CloseSequence():
                    if self.holdings.close(command):
                        self._leave(command.sequence_id)
        except PacelineError as error:
            round_number = command.round if isinstance(command, DraftRound) else 0
            return [SequenceFailed(command.sequence_id, command.epoch, round_number, error)]
        return []

    def _open(self, command: OpenSequence) -> None:
        check_opening(command.token_ids, command.params, self._vocabulary_size)
        held = self.holdings.find(command.sequence_id)
        if held is not None and held.session.epoch < command.epoch:
            self._leave(command.sequence_id)
        self.holdings.open(command)

    def _begin(self, command: DraftRound, arrived: float) -> list[DraftEvent]:
        held = self.holdings.get(command.sequence_id)
        check_token_ids("committed_tail", command.committed_tail, self._vocabulary_size)
        if command.base_length + command.num_draft_tokens - 1 > self._max_model_len:
            raise InvalidArgumentError(
                "num_draft_tokens", f"end beyond the model's length of {self._max_model_len}"
            )
        disposition = held.session.begin(
            command.epoch,
            command.round,
            command.base_length,
            command.committed_tail,
            round_digest(command.base_length, num_draft_tokens=command.num_draft_tokens),
        )
        if disposition is Disposition.IN_PROGRESS:
            return []
        if disposition is Disposition.REPEAT:
            assert held.session.answer is not None
            return [held.session.answer]
        drafting = self._foreseen(command, held, arrived) or self._from_ledger(command, held, arrived)
        r = self._rounds[command.sequence_id] = _Round(command, drafting)
        return [self._settle(r)] if drafting.complete else []

    def _from_ledger(self, command: DraftRound, held: Held[DraftProposal], arrived: float) -> Drafting:
        """Draft from the ledger: feed what the cache lacks of it."""
        held.cut_to_ledger()
        feed = held.session.tokens[held.table.length :]
        base, k = command.base_length, command.num_draft_tokens
        tape = NoiseTape.record(held.session.params, base, k, self._vocabulary_size)
        return Drafting(Job(held, feed, rows=1, arrived=arrived), base, k, tape)

    def _foreseen(self, command: DraftRound, held: Held[DraftProposal], arrived: float) -> Drafting | None:
        """Go on from the branch of the outcome that came true, if there is one; all others are freed."""
        ahead = self._aheads.pop(command.sequence_id, None)
        if ahead is None:
            return None
        accepted = ahead.accepted_by(command.base_length)
        if accepted is None:
            ahead.free()
            return None
        next_token = held.session.tokens[-1]
        self._fan_out.observe(accepted, len(ahead.drawn), ahead.rank(accepted, next_token))
        self.lookahead.rounds += 1
        branch = ahead.take(accepted, next_token)
        if branch is None:
            return None
        self.lookahead.hits += 1
        held.table.free()
        held.table, held.session.cached = branch.job.held.table, branch.job.held.session.cached
        return self._continued(branch, command, held, arrived)

    def _continued(
        self, branch: Drafting, command: DraftRound, held: Held[DraftProposal], arrived: float
    ) -> Drafting:
        """The branch as the sequence's own drafting, with as many tokens as this round wants."""
        base, k = command.base_length, command.num_draft_tokens
        drawn = branch.drawn[:k]
        job = Job(held, branch.job.feed, rows=1, arrived=arrived)
        if len(drawn) == k:
            held.cut_to(base + k - 1)
        elif branch.complete:
            job.feed_next([drawn[-1].token_id], rows=1)
        # Noise depends on the round's place alone, so a longer tape begins like the shorter one.
        tape = NoiseTape.record(held.session.params, base, k, self._vocabulary_size)
        return Drafting(job, base, k, tape, drawn)

    def step(self) -> list[DraftEvent]:
        """Run one pass: over the rounds in progress if there are any, else over branches."""
        if not self._rounds:
            return self._step_ahead()
        by_id = {r.job.sequence_id: r for r in self._rounds.values()}
        jobs = [r.job for r in by_id.values()]
        result = run_pass(jobs, self._runner, self._config.max_batch_tokens, self._clock)
        events: list[DraftEvent] = []
        for job, error in result.failed:
            # Branches are worth less than a round: give their blocks back and try again.
            if not (isinstance(error, ResourceExhaustedError) and self._free_branches()):
                events.append(self._fail(job, error))
        if result.finished:
            assert result.logits is not None
            rounds = [by_id[job.sequence_id] for job in result.finished]
            drawn = self._draw([r.drafting for r in rounds], result.logits)
            for r, token in zip(rounds, drawn, strict=True):
                if token is None:
                    error = InternalError("the draft model's logits are not numbers")
                    events.append(self._fail(r.job, error))
                    continue
                r.drafting.take(token)
                if r.drafting.complete:
                    events.append(self._settle(r))
        return events

    def _draw(self, draftings: Sequence[Drafting], logits: torch.Tensor) -> list[Drawn | None]:
        """The next token of each, None where the logits are no distribution."""
        begun = self._clock()
        drawn = propose(
            [d.step for d in draftings],
            logits,
            self._config.support_mass,
            self._config.support_bound,
            self._eos_token_ids,
            MAX_RANK if self._config.lookahead_branches else 0,
        )
        broken = broken_rows(logits)
        spent = self._clock() - begun
        for d in draftings:
            d.job.compute += spent
        return [None if bad else token for token, bad in zip(drawn, broken, strict=True)]

    def _settle(self, r: _Round) -> DraftProposal:
        """Answer the round, and begin to look ahead of its verdict."""
        command, held, drafting = r.command, r.job.held, r.drafting
        del self._rounds[command.sequence_id]
        distributions = tuple(d.distribution for d in drafting.drawn if d.distribution is not None)
        answer = DraftProposal(
            command.sequence_id,
            command.epoch,
            command.round,
            command.base_length,
            Proposal(tuple(drafting.token_ids), distributions=distributions),
            held.table.length,
            r.job.timings(),
        )
        held.session.finish(answer)
        # Entries up to the last token of the longest branch, and one past it, must exist.
        room = command.base_length + 2 * drafting.k + 1 <= self._max_model_len
        if self._branches_each() and room:
            last = Job(held, [drafting.token_ids[-1]], rows=1, arrived=self._clock())
            tape = NoiseTape.record(
                held.session.params, drafting.base_length, drafting.k + 1, self._vocabulary_size
            )
            self._aheads[command.sequence_id] = Ahead(
                held,
                command.round,
                command.base_length,
                drafting.drawn,
                drafting.k,
                self._vocabulary_size,
                Drafting(last, drafting.base_length, drafting.k + 1, tape, list(drafting.drawn)),
            )
        return answer

    def _branches_each(self) -> int:
        """Branches a sequence may have: with many sequences there is no idle time to fill."""
        return self._config.lookahead_branches // max(1, len(self.holdings))

    def _step_ahead(self) -> list[DraftEvent]:
        """Run one pass over branches, no longer than a round that arrives can wait for."""
        of: dict[str, tuple[Ahead, Drafting]] = {}
        for ahead in self._aheads.values():
            of.update({d.job.sequence_id: (ahead, d) for d in ahead.unfinished()})
        jobs = [d.job for _, d in of.values()]
        result = run_pass(jobs, self._runner, self._config.lookahead_branches, self._clock)
        for job, _ in result.failed:
            of[job.sequence_id][0].give_up(of[job.sequence_id][1])
        if not result.finished:
            return []
        assert result.logits is not None
        finished = [of[job.sequence_id] for job in result.finished]
        drawn = self._draw([d for _, d in finished], result.logits)
        for (ahead, drafting), token in zip(finished, drawn, strict=True):
            if token is None:
                ahead.give_up(drafting)
            elif drafting is ahead.last_entry:
                ahead.last_entry = None
                ahead.bonus_guesses = (token.token_id, *token.others)
                ahead.open_branches(self._fan_out, self._branches_each(), self._runner.fork, self._clock())
            else:
                drafting.take(token)
        done = [ahead for ahead in {id(a): a for a, _ in finished}.values() if not ahead.unfinished()]
        return [event for ahead in done if (event := ahead.continuations()) is not None]

    def branch_tables(self) -> list[BlockTable]:
        """The tables of all branches; with those of the holdings they own every used block."""
        return [b.job.held.table for ahead in self._aheads.values() for b in ahead.branches.values()]

    def _free_branches(self) -> bool:
        """Give the blocks of all branches back; False when there were none."""
        found = any(ahead.branches for ahead in self._aheads.values())
        for ahead in self._aheads.values():
            ahead.free()
        self._aheads.clear()
        return found

    def _leave(self, sequence_id: str) -> None:
        """Forget what is in progress for a sequence."""
        self._rounds.pop(sequence_id, None)
        ahead = self._aheads.pop(sequence_id, None)
        if ahead is not None:
            ahead.free()

    def _fail(self, job: Job, error: PacelineError) -> DraftEvent:
        """End a round without a proposal; the sequence stays, cut back to its ledger."""
        r = self._rounds.pop(job.sequence_id)
        held: Held[DraftProposal] = job.held
        held.cut_to_ledger()
        held.session.abandon_round()
        return SequenceFailed(r.command.sequence_id, r.command.epoch, r.command.round, error)

    def drop(self, sequence_id: str) -> None:
        """Forget a sequence whose coordinator went away."""
        self._leave(sequence_id)
        self.holdings.drop(sequence_id)

    def expire(self) -> None:
        """Drop the sequences whose lease is over, except those being computed."""
        for sequence_id in self.holdings.expired():
            if sequence_id not in self._rounds:
                self._leave(sequence_id)
                self.holdings.drop(sequence_id)
