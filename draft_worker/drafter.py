"""The draft worker without sockets and threads: rounds in, proposals out.

Each of the K steps is one pass over all drafting sequences, whatever step each one is at. Where nobody has
to look at a step's logits, the model makes all steps after the first by itself (chaining.py). After a full
acceptance the entry of dK is missing here, since the last draft token is never fed; the next round's feed
includes it, because a feed is always everything of the ledger that the cache lacks.

While no round wants a pass, a draft that looks ahead reads the prompts of sequences that were opened
(reading.py), and drafts branches for the likely outcomes of the verifications in progress (ahead.py); by
turns where there is both to do. A round that arrives goes first, at the next step. A draft that does not look
ahead may share its device: it reads a prompt when a round asks for it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from draft_worker.chaining import can_chain, chain_of
from draft_worker.chooser import Chooser, drawn_by
from draft_worker.drafting import Drafting, Round
from draft_worker.lookahead import Lookahead
from draft_worker.propose import Drawn, NoiseTape
from draft_worker.reading import Reading
from draft_worker.runner import Runner
from paceline.core.clock import Clock, monotonic
from paceline.core.config import DraftConfig
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
from paceline.engine.scheduling.mask import grammar_for
from paceline.engine.scheduling.passes import Job, run_pass, together_or_alone
from paceline.engine.scheduling.sequences import HeldSequence, HeldSequences
from paceline.engine.scheduling.session import Disposition, question_of
from paceline.grammar import Grammars
from paceline.rpc.codec import check_opening, check_token_ids
from paceline.rpc.codec.status import code_name
from paceline.telemetry.span_interface import Attributes
from paceline.telemetry.worker import WorkerObserver, timings_told

log = logging.getLogger(__name__)


class Drafter:
    """Proposes tokens with the draft model. Not thread-safe: the engine thread owns it."""

    def __init__(
        self,
        runner: Runner,
        config: DraftConfig,
        *,
        vocabulary_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int] = (),
        grammars: Grammars | None = None,
        clock: Clock = monotonic,
        observer: WorkerObserver | None = None,
    ) -> None:
        self._runner = runner
        self._config = config
        self._vocabulary_size = vocabulary_size
        self._max_model_len = max_model_len
        self._eos_token_ids = tuple(eos_token_ids)
        self.grammars = grammars
        self._clock = clock
        self.observer = WorkerObserver() if observer is None else observer
        self.sequences: HeldSequences[DraftProposal] = HeldSequences(
            runner.new_table, config.max_sequences, clock, config.lease_seconds, config.prefix_cache
        )
        self._rounds: dict[str, Round] = {}
        self._chooser = Chooser(config, self._eos_token_ids)
        self.lookahead = Lookahead(
            runner,
            config,
            self._chooser,
            self.sequences,
            self.observer.passes["ahead"],
            max_model_len=max_model_len,
            eos_token_ids=self._eos_token_ids,
            clock=clock,
        )
        passes = self.observer.passes["ahead"]
        beside = config.max_mixed_prefill_tokens or None
        budget = config.max_batch_tokens
        self._reading = Reading(runner, self.sequences, self.lookahead.free, passes, clock, budget, beside)
        self._read_last = False
        """The last pass that no round wanted read a prompt."""

    @property
    def has_work(self) -> bool:
        """True while a round lacks draft tokens, or a branch does, or a prompt is not read."""
        return bool(self._rounds) or self._reading.has_work or self.lookahead.has_work

    def reset_cancel(self) -> None:
        """What was announced so far is about to be taken up."""
        self.lookahead.reset_cancel()

    def notify(self, commands: Sequence[DraftCommand | SequenceFailed]) -> None:
        """Commands wait: a round is worth more than what is drafted ahead. Called from any thread."""
        self.lookahead.interrupt()

    def batching_delay(self) -> float:
        """Its steps are short, and verifications wait for them."""
        return 0.0

    def holds(self, sequence_id: str) -> bool:
        """True while the sequence has state here."""
        return sequence_id in self.sequences

    def handle(self, command: DraftCommand, arrived: float) -> list[DraftEvent]:
        """Take a command up. A refusal, or the answer to a repeated round, comes back at once."""
        try:
            match command:
                case OpenSequence():
                    self._open(command)
                case DraftRound():
                    return self._begin(command, arrived)
                case CloseSequence():
                    if self.sequences.close(command):
                        self._leave(command.sequence_id)
        except PacelineError as error:
            round_number = command.round if isinstance(command, DraftRound) else 0
            return [SequenceFailed(command.sequence_id, command.epoch, round_number, error)]
        return []

    def _open(self, command: OpenSequence) -> None:
        check_opening(command.token_ids, command.params, self._vocabulary_size, self._eos_token_ids)
        grammar = grammar_for(command.params, self.grammars)
        held = self.sequences.find(command.sequence_id)
        is_new = held is None or held.session.epoch < command.epoch
        if is_new:
            self._leave(command.sequence_id)
        self.sequences.open(command, grammar)
        if self._config.lookahead_branches and is_new:
            self._reading.begin(command.sequence_id)

    def _begin(self, command: DraftRound, arrived: float) -> list[DraftEvent]:
        held = self.sequences.get(command.sequence_id)
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
        drawn = self.lookahead.adopt(command, held)
        if not drawn:
            held.cut_to_ledger()
        tokens, base, k = held.session.tokens, command.base_length, command.num_draft_tokens
        # Noise depends on the round's place alone, so what a branch drew is drawn already.
        tape = NoiseTape.record(held.session.params, base, k)
        drafting = Drafting(held.session.params, tokens, k, tape, drawn, held.grammar)
        feed = [*tokens, *drafting.token_ids][held.table.length :]
        job = Job(held, feed, rows=1, arrived=arrived, prefill=self._reading.leave(command.sequence_id))
        r = Round(command, drafting, job)
        self._rounds[command.sequence_id] = r
        return self._settle(r) if drafting.complete else []

    def step(self) -> list[DraftEvent]:
        """Go on with the rounds in progress: whole chains, then one pass. Without any read or look ahead."""
        if not self._rounds:
            return self._unasked()
        events = self._chain()
        return [*events, *self._pass()] if self._rounds else events

    def _unasked(self) -> list[DraftEvent]:
        """Read a prompt or look ahead, by turns where there is both to do. What grew is told first."""
        ahead, reading = self.lookahead, self._reading
        turn = ahead.has_work and self._read_last
        self._read_last = reading.has_work and not ahead.has_news and not turn
        if not self._read_last:
            return ahead.step()
        reading.step()
        return []

    def _chain(self) -> list[DraftEvent]:
        """Draw what nobody has to look at; all else goes on step by step, also what fails here."""
        skills = self._runner.chain_skills
        most = 0 if skills is None else skills.max_feed
        config, others = self._config, self._chooser.num_others
        rounds: list[Round] = []
        room = config.max_batch_tokens
        for r in self._rounds.values():
            short = r.job.remaining <= min(most, room) and not r.job.begins
            if short and can_chain(r.drafting, skills, self._eos_token_ids):
                rounds.append(r)
                room -= r.job.remaining
        if not rounds:
            return []
        chains = [
            chain_of(r.drafting, r.job.held.table, r.job.feed[r.job.offset :], config, others) for r in rounds
        ]
        begun = self._clock()
        try:
            drawn = self._runner.forward_chains(chains)
        except ResourceExhaustedError:
            return []
        except Exception:
            log.exception("drawing %d chains failed; going on token by token", len(chains))
            return []
        spent = self._clock() - begun
        rows = sum(chain.entries(found) for chain, found in zip(chains, drawn, strict=True))
        self.observer.passes["rounds"].ran(rows, len(chains), spent)
        events: list[DraftEvent] = []
        for r, chain, found in zip(rounds, chains, drawn, strict=True):
            r.job.ran(begun, spent, rows, len(chains))
            if not found.token_ids:
                continue
            r.job.held.fed([*chain.token_ids, *found.token_ids[:-1]])
            r.job.held.found_sound()
            r.drafting.drawn.extend(drawn_by(found))
            if r.drafting.complete:
                events += self._settle(r)
            else:
                r.job.feed_next([r.drafting.newest], rows=1)
        return events

    def _pass(self) -> list[DraftEvent]:
        """One pass over the rounds in progress, and the tokens that it decides."""
        by_id = {r.job.sequence_id: r for r in self._rounds.values()}
        config = self._config
        result = run_pass(
            [r.job for r in by_id.values()],
            self._runner,
            config.max_batch_tokens,
            self._clock,
            self.sequences,
            self.lookahead.free,  # worth less than a round
            config.max_mixed_prefill_tokens or None,
            self.observer.passes["rounds"],
        )
        events: list[DraftEvent] = []
        for job, error in result.failed:
            events += self._break_off(job, error)
        if not result.finished:
            return events
        assert result.logits is not None
        rounds = [by_id[job.sequence_id] for job in result.finished]
        begun = self._clock()
        drawn = together_or_alone(
            rounds,
            result.logits,
            [1] * len(rounds),
            lambda some, rows: self._chooser.draw([r.drafting for r in some], rows),
            "drawing",
        )
        spent = self._clock() - begun
        for r, token in zip(rounds, drawn, strict=True):
            r.job.compute += spent
            if token is None:
                r.job.held.found_broken()
            if not isinstance(token, Drawn):
                error = token or InternalError("the draft model's logits are not numbers")
                events += self._break_off(r.job, error)
                continue
            r.job.held.found_sound()
            r.drafting.drawn.append(token)
            if r.drafting.complete:
                events += self._settle(r)
            else:
                r.job.feed_next([token.token_id], rows=1)
        return events

    def _settle(self, r: Round, error: str = "") -> list[DraftEvent]:
        """Answer the round if that is wanted, and begin to look ahead of its verdict. `error` is the code of
        what broke it off."""
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
            self._trace(r, error)
        if drafting.complete:
            self.lookahead.begin(command, held, drafting)
        return [] if command.proposal_known else [answer]

    def _trace(self, r: Round, error: str = "") -> None:
        """Tell whoever traces the request of this round."""
        where = r.job.held.session.params.traceparent, r.command.sequence_id, r.command.round
        attributes: Attributes = {
            "paceline.num_draft_tokens": len(r.drafting.drawn),
            **timings_told(r.job.timings()),
        }
        self.observer.answered(*where, r.job.arrived, self._clock(), attributes, error)

    def _break_off(self, job: Job, error: PacelineError) -> list[DraftEvent]:
        """End a round that cannot go on; where tokens are drawn from distributions, with those that are.

        Whether the next one can be may depend on them: in proposals that are not dropped for that they would
        have other distributions than the target is told.
        """
        r = self._rounds[job.sequence_id]
        by_room = isinstance(error, ResourceExhaustedError)  # which depends on no token
        if r.drafting.params.target_decides or not r.drafting.drawn or by_room:
            return [self._fail(job, error)]
        held = r.job.held
        held.cut_to(min(held.table.length, r.command.base_length + len(r.drafting.drawn) - 1))
        return self._settle(r, code_name(error))

    def _fail(self, job: Job, error: PacelineError) -> DraftEvent:
        """End a round without a proposal; the sequence stays, cut back to its ledger."""
        r = self._rounds.pop(job.sequence_id)
        held: HeldSequence[DraftProposal] = job.held
        if held.session.params.traceparent:
            self._trace(r, code_name(error))
        held.cut_to_ledger()
        held.session.abandon_round()
        return SequenceFailed(r.command.sequence_id, r.command.epoch, r.command.round, error)

    def _leave(self, sequence_id: str) -> None:
        """Forget what is in progress for a sequence."""
        self._rounds.pop(sequence_id, None)
        self._reading.leave(sequence_id)
        self.lookahead.leave(sequence_id)

    def drop(self, sequence_id: str) -> None:
        """Forget a sequence whose coordinator went away."""
        self._leave(sequence_id)
        self.sequences.drop(sequence_id)

    def expire(self) -> None:
        """Drop the sequences whose lease is over, except those being computed."""
        for sequence_id in self.sequences.expired():
            if sequence_id not in self._rounds:
                self._leave(sequence_id)
                self.sequences.drop(sequence_id)
