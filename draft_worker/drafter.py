"""The draft worker without sockets and threads: rounds in, proposals out.

Each of the K steps is one pass over all drafting sequences, whatever step each one is at. Where nobody has
to look at a step's logits, the model makes all steps after the first by itself (chaining.py). A sequence's
prompt is prefilled by its first round, not before: prefill is lazy. After a full acceptance the entry of
dK is missing here, since the last draft token is never fed; the next round's feed includes it, because a
feed is always everything of the ledger that the cache lacks.

While no round wants a pass, branches are drafted for the likely outcomes of the verifications in
progress (ahead.py). A round that arrives goes first, at the next step.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from itertools import repeat

import torch

from draft_worker.ahead import Ahead, Limb, LookaheadCounts
from draft_worker.chaining import chains_of
from draft_worker.drafting import Drafting, Round
from draft_worker.fanout import MAX_RANK, FanOut
from draft_worker.propose import Drawn, NoiseTape, propose
from draft_worker.runner import Runner
from draft_worker.structure import only_allowed, restrictions_of, steps_under
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
from paceline.decoding.noise_memo import NoiseMemo
from paceline.engine.holdings import Held, Holdings
from paceline.engine.passes import Job, broken_rows, run_pass
from paceline.engine.session import Disposition, question_of
from paceline.engine.structured import grammar_for, restricted
from paceline.grammar import Grammars
from paceline.kv import BlockTable
from paceline.rpc.codec import check_opening, check_token_ids
from paceline.rpc.status import code_name
from paceline.telemetry.tracing import Attributes
from paceline.telemetry.worker import WorkerObserver, timings_told

log = logging.getLogger(__name__)


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
        grammars: Grammars | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self._runner = runner
        self._config = config
        self._vocabulary_size = vocabulary_size
        self._max_model_len = max_model_len
        self._eos_token_ids = tuple(eos_token_ids)
        self._grammars = grammars
        self._clock = clock
        self.observer = WorkerObserver()
        self.holdings: Holdings[DraftProposal] = Holdings(
            runner.new_table, config.max_sequences, clock, config.lease_seconds, config.prefix_cache
        )
        self._rounds: dict[str, Round] = {}
        self._noise = NoiseMemo(vocabulary_size)
        self._aheads: dict[str, Ahead] = {}
        self._fan_out = FanOut()
        self.lookahead = LookaheadCounts()

    @property
    def has_work(self) -> bool:
        """True while a round lacks draft tokens, or a branch does."""
        return bool(self._rounds) or any(ahead.wants_passes for ahead in self._aheads.values())

    def prepare(self) -> bool:
        """Make a row of noise that the next rounds will ask for."""
        return self._noise.prepare()

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
        check_opening(command.token_ids, command.params, self._vocabulary_size, self._eos_token_ids)
        grammar = grammar_for(command.params, self._grammars)
        held = self.holdings.find(command.sequence_id)
        if held is not None and held.session.epoch < command.epoch:
            self._leave(command.sequence_id)
        self.holdings.open(command, grammar)

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
            question_of(command.base_length, num_draft_tokens=command.num_draft_tokens),
        )
        if disposition is Disposition.IN_PROGRESS:
            return []
        if disposition is Disposition.REPEAT:
            assert held.session.answer is not None
            return [held.session.answer]
        drawn = self._foreseen(command, held)
        if not drawn:
            held.cut_to_ledger()
        tokens, base, k = held.session.tokens, command.base_length, command.num_draft_tokens
        # Noise depends on the round's place alone, so what a branch drew is drawn already.
        tape = NoiseTape.record(held.session.params, base, k, self._noise)
        drafting = Drafting(held.session.params, tokens, k, tape, drawn, held.grammar)
        feed = [*tokens, *drafting.token_ids][held.table.length :]
        r = Round(command, drafting, Job(held, feed, rows=1, arrived=arrived))
        self._rounds[command.sequence_id] = r
        return [self._settle(r)] if drafting.complete else []

    def _foreseen(self, command: DraftRound, held: Held[DraftProposal]) -> list[Drawn]:
        """What a branch has drawn for the outcome that came true; its entries become the sequence's own.

        Nothing where no branch foresaw it. The other branches are freed.
        """
        ahead = self._aheads.pop(command.sequence_id, None)
        if ahead is None:
            return []
        try:
            return self._adopted(ahead, command, held)
        finally:
            ahead.region.free()

    def _adopted(self, ahead: Ahead, command: DraftRound, held: Held[DraftProposal]) -> list[Drawn]:
        tokens = held.session.tokens
        accepted = ahead.accepted_by(tokens)
        if accepted is None:
            return []
        self._fan_out.observe(accepted, len(ahead.drawn), ahead.rank(accepted, tokens[-1]))
        self.lookahead.rounds += 1
        limb = ahead.branches.get((accepted, tokens[-1]))
        if limb is None:
            return []
        try:
            self._runner.adopt(limb.entries)
        except ResourceExhaustedError:
            held.cut_to(held.table.length)
            return []
        self.lookahead.hits += 1
        held.session.cached = [*tokens, *limb.drafting.token_ids][: held.table.length]
        drawn = limb.drafting.drawn[: command.num_draft_tokens]
        held.cut_to(min(held.table.length, command.base_length + len(drawn) - 1 + (not drawn)))
        return drawn

    def step(self) -> list[DraftEvent]:
        """Run one pass: over the rounds in progress if there are any, else over branches."""
        if not self._rounds:
            return self._step_ahead()
        by_id = {r.job.sequence_id: r for r in self._rounds.values()}
        jobs = [r.job for r in by_id.values()]
        config = self._config
        result = run_pass(
            jobs,
            self._runner,
            config.max_batch_tokens,
            self._clock,
            self.holdings,
            self._free_branches,  # worth less than a round
            config.max_mixed_prefill_tokens or None,
            self.observer.passes["rounds"],
        )
        events: list[DraftEvent] = [self._fail(job, error) for job, error in result.failed]
        if result.finished:
            assert result.logits is not None
            rounds = [by_id[job.sequence_id] for job in result.finished]
            begun = self._clock()
            drawn = self._draw([r.drafting for r in rounds], result.logits)
            spent = self._clock() - begun
            for r, token in zip(rounds, drawn, strict=True):
                r.job.compute += spent
                if token is None:
                    error = InternalError("the draft model's logits are not numbers")
                    events.append(self._fail(r.job, error))
                    continue
                r.drafting.drawn.append(token)
                if r.drafting.complete:
                    events.append(self._settle(r))
                else:
                    r.job.feed_next([token.token_id], rows=1)
            events.extend(self._chain([r for r in rounds if r.command.sequence_id in self._rounds]))
        return events

    def _chain(self, rounds: Sequence[Round]) -> list[DraftEvent]:
        """Complete what needs nobody to look on; the rest goes on step by step, also what fails here."""
        drawing = chains_of(rounds, self._runner.chain_skills, self._config, self._eos_token_ids, self._ranks)
        if not drawing:
            return []
        begun = self._clock()
        try:
            drawn = self._runner.forward_chains([chain for _, chain in drawing])
        except ResourceExhaustedError:
            return []
        except Exception:
            log.exception("drawing %d chains failed; going on token by token", len(drawing))
            return []
        spent = self._clock() - begun
        self.observer.passes["rounds"].ran(sum(len(c.token_ids) for c in drawn), len(drawing), spent)
        events: list[DraftEvent] = []
        for (r, chain), found in zip(drawing, drawn, strict=True):
            r.job.compute += spent
            r.job.held.fed([chain.token_id, *found.token_ids][: len(found.token_ids)])
            told = found.distributions or repeat(None), found.others or repeat(())
            r.drafting.drawn.extend(map(Drawn, found.token_ids, *told))
            if r.drafting.complete:
                events.append(self._settle(r))
            else:
                r.job.feed_next([r.drafting.newest], rows=1)
        return events

    @property
    def _ranks(self) -> int:
        """Other tokens that each drawn one is told with: what branches may begin with."""
        return MAX_RANK if self._config.lookahead_branches else 0

    def _draw(self, draftings: Sequence[Drafting], logits: torch.Tensor) -> list[Drawn | None]:
        """The next token of each, None where the logits are no distribution."""
        steps, allowed = [d.step for d in draftings], logits
        restrictions = restrictions_of(draftings, self._eos_token_ids)
        if restrictions is not None:
            steps = steps_under(steps, restrictions)
            allowed = restricted(logits, restrictions, [1] * len(steps))
        drawn = propose(
            steps,
            allowed,
            self._config.support_mass,
            self._config.support_bound,
            self._eos_token_ids,
            self._ranks,
        )
        if restrictions is not None:
            drawn = only_allowed(drawn, restrictions)
        broken = broken_rows(logits)
        return [None if bad else token for token, bad in zip(drawn, broken, strict=True)]

    def _settle(self, r: Round) -> DraftProposal:
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
        if held.session.params.traceparent:
            self._trace(r)
        self._look_ahead(command, held, drafting)
        return answer

    def _trace(self, r: Round, error: str = "") -> None:
        """Tell whoever traces the request of this round."""
        where = r.job.held.session.params.traceparent, r.command.sequence_id, r.command.round
        attributes: Attributes = {
            "paceline.num_draft_tokens": len(r.drafting.drawn),
            **timings_told(r.job.timings()),
        }
        self.observer.answered(*where, r.job.arrived, self._clock(), attributes, error)

    def _look_ahead(self, command: DraftRound, held: Held[DraftProposal], drafting: Drafting) -> None:
        """Begin branches for the verdict's outcomes, where there is time, length and memory for them."""
        # Entries up to the last token of the longest branch, and one past it, must exist.
        base, k, depth = command.base_length, drafting.k, command.num_lookahead_tokens or drafting.k
        outcomes = self._fan_out.ranked(k)
        if not (self._branches_each() and outcomes) or base + k + depth + 1 > self._max_model_len:
            return
        tape = NoiseTape.record(held.session.params, base, k + depth + 1, self._noise)
        with contextlib.suppress(ResourceExhaustedError):
            self._aheads[command.sequence_id] = Ahead(
                held, command.round, drafting.drawn, depth, tape, outcomes
            )

    def _branches_each(self) -> int:
        """Branches a sequence may have: with many sequences there is no idle time to fill."""
        return self._config.lookahead_branches // max(1, len(self.holdings))

    def _step_ahead(self) -> list[DraftEvent]:
        """Run one pass over branches, no longer than a round that arrives can wait for."""
        limbs: list[tuple[Ahead, Limb]] = []
        for ahead in self._aheads.values():
            ahead.open_branches(self._branches_each())
            limbs += [(ahead, limb) for limb in ahead.unfinished()]
        if not limbs:
            return []
        begun = self._clock()
        try:
            logits = self._runner.forward_branches([limb.next_input for _, limb in limbs])
        except Exception:
            log.exception("a pass over %d branches failed; going on without them", len(limbs))
            self._free_branches()
            return []
        self.observer.passes["ahead"].ran(
            len(limbs), len({id(ahead) for ahead, _ in limbs}), self._clock() - begun
        )
        drawn = self._draw([limb.drafting for _, limb in limbs], logits)
        for (ahead, limb), token in zip(limbs, drawn, strict=True):
            if token is None:
                ahead.give_up(limb)
            else:
                ahead.take(limb, token)
        aheads = list(self._aheads.values())
        return [event for ahead in aheads if (event := ahead.continuations()) is not None]

    def branch_tables(self) -> list[BlockTable]:
        """The tables of all branches; with those of the holdings they own every used block."""
        return [table for ahead in self._aheads.values() for table in ahead.region.tables]

    def _free_branches(self) -> bool:
        """Give the blocks of all branches back; False when there were none."""
        found = bool(self._aheads)
        for ahead in self._aheads.values():
            ahead.region.free()
        self._aheads.clear()
        return found

    def _leave(self, sequence_id: str) -> None:
        """Forget what is in progress for a sequence."""
        self._rounds.pop(sequence_id, None)
        ahead = self._aheads.pop(sequence_id, None)
        if ahead is not None:
            ahead.region.free()

    def _fail(self, job: Job, error: PacelineError) -> DraftEvent:
        """End a round without a proposal; the sequence stays, cut back to its ledger."""
        r = self._rounds.pop(job.sequence_id)
        held: Held[DraftProposal] = job.held
        if held.session.params.traceparent:
            self._trace(r, code_name(error))
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
