"""The target worker without sockets and threads: sequences in, verdicts out.

All ready sequences, with their different numbers of draft tokens, share one pass. The worker decides,
truncates its own cache to `ledger length - 1` entries, and only then answers.

While a round is in progress the coordinator may say what to judge next for some of its outcomes, or that
nothing is to be judged next. The next round then begins in the same breath as the verdict leaves, without a
message; so it does where it is told just after that.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from paceline.core import limits
from paceline.core.clock import Clock, monotonic
from paceline.core.config import TargetConfig
from paceline.core.errors import InternalError, InvalidArgumentError, PacelineError
from paceline.core.messages import (
    CloseSequence,
    OpenSequence,
    RoundVerdict,
    SequenceFailed,
    TargetCommand,
    TargetEvent,
    VerifyAhead,
    VerifyRound,
)
from paceline.core.types import AcceptanceMode, Timings, TokenLogprobs, Verdict
from paceline.decoding.sampling import check_sparse
from paceline.engine.scheduling.mask import grammar_for, restriction
from paceline.engine.scheduling.passes import Job, PassResult, own_error, run_pass, together_or_alone
from paceline.engine.scheduling.sequences import HeldSequence, HeldSequences
from paceline.engine.scheduling.session import Disposition, question_of
from paceline.grammar import Grammars
from paceline.rpc.codec import check_opening, check_token_ids
from paceline.rpc.codec.status import code_name
from paceline.telemetry.span_interface import Attributes
from paceline.telemetry.worker import WorkerObserver, timings_told
from target_worker.decide import Case
from target_worker.gathering import Gathering
from target_worker.preverify import FirstRows
from target_worker.results import (
    NO_CHOICE,
    Judgement,
    in_progress,
    judgements,
    prompt_logprobs,
    reads,
    reported,
    with_known_rows,
)
from target_worker.rounds import NOTHING, FirstRow, Round, after, following_late, is_scored, place
from target_worker.runner import Runner

MAX_OVERHEARD = 4096
"""Commands kept for the pass in progress; the oldest are forgotten, and still handled in their turn."""
JUDGING = "judging"
"""What comes after a pass, by its name in the log and in errors."""


class Verifier:
    """Judges proposals with the target model. Not thread-safe: the engine thread owns it."""

    def __init__(
        self,
        runner: Runner,
        config: TargetConfig,
        *,
        vocabulary_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int] = (),
        grammars: Grammars | None = None,
        clock: Clock = monotonic,
        observer: WorkerObserver | None = None,
    ) -> None:
        self._runner = runner
        self._budget = config.max_batch_tokens
        self._beside = config.max_mixed_prefill_tokens or None
        self._vocabulary_size = vocabulary_size
        self._max_model_len = max_model_len
        self._eos_token_ids = tuple(eos_token_ids)
        self.grammars = grammars
        self._clock = clock
        self.observer = WorkerObserver() if observer is None else observer
        self.sequences: HeldSequences[Verdict] = HeldSequences(
            runner.new_table, config.max_sequences, clock, config.lease_seconds, config.prefix_cache
        )
        self._rounds: dict[str, Round] = {}
        self._overheard: deque[VerifyAhead] = deque(maxlen=MAX_OVERHEARD)
        """What arrived since the last pass; the only thing here that another thread touches."""
        self._gathering = Gathering()
        self._first_rows = FirstRows(
            runner,
            self.sequences,
            self._eos_token_ids,
            max_model_len,
            clock,
            self.observer.passes["ahead"],
            config.pre_verify,
            config.max_batch_tokens,
        )

    @property
    def has_work(self) -> bool:
        """True while a round waits for its verdict, or a sequence for its round."""
        return bool(self._rounds) or self._first_rows.has_work

    def batching_delay(self) -> float:
        """Seconds that the next pass may wait for rounds that are about to come; none to read a prompt."""
        if not self._rounds:
            return self._first_rows.batching_delay()
        jobs = [r.job for r in self._rounds.values()]
        return (
            0.0 if reads(jobs) else self._gathering.batching_delay(sum(j.rows for j in jobs), self._clock())
        )

    def reset_cancel(self) -> None:
        """What was announced so far is about to be taken up."""
        self._first_rows.cancel.reset()

    def notify(self, commands: Sequence[TargetCommand | SequenceFailed]) -> None:
        """Commands wait: they go before what nobody asked for, and what to judge next is of use to the pass.

        Called from any thread.
        """
        self._first_rows.cancel.cancel()
        self._overheard.extend(command for command in commands if isinstance(command, VerifyAhead))

    def holds(self, sequence_id: str) -> bool:
        """True while the sequence has state here."""
        return sequence_id in self.sequences

    def handle(self, command: TargetCommand, arrived: float) -> list[TargetEvent]:
        """Take a command up. A refusal, or the answer to a repeated round, comes back at once."""
        try:
            match command:
                case OpenSequence():
                    self._open(command)
                case VerifyRound():
                    return self._begin(command, arrived)
                case VerifyAhead():
                    self._foresee(command)
                    return self._begin_late(command, arrived)
                case CloseSequence():
                    if self.sequences.close(command):
                        self._leave(command.sequence_id)
        except PacelineError as error:
            round_number = command.round if isinstance(command, VerifyRound | VerifyAhead) else 0
            return [SequenceFailed(command.sequence_id, command.epoch, round_number, error)]
        return []

    def _open(self, command: OpenSequence) -> None:
        check_opening(command.token_ids, command.params, self._vocabulary_size, self._eos_token_ids)
        grammar = grammar_for(command.params, self.grammars)
        held = self.sequences.find(command.sequence_id)
        if held is not None and held.session.epoch < command.epoch:
            self._rounds.pop(command.sequence_id, None)
            self._first_rows.gone(command.sequence_id)
        self.sequences.open(command, grammar)

    def _begin(self, command: VerifyRound, arrived: float) -> list[TargetEvent]:
        held = self.sequences.get(command.sequence_id)
        self._check(command, held)
        disposition = held.session.begin(
            command.epoch,
            command.round,
            command.base_length,
            command.committed_tail,
            question_of(command.base_length, command.proposal),
        )
        if disposition is Disposition.IN_PROGRESS:
            return []
        if disposition is Disposition.REPEAT:
            assert held.session.answer is not None
            return [RoundVerdict(command.sequence_id, command.epoch, command.round, held.session.answer)]
        scored = is_scored(held.session.params, command.base_length)
        if scored:
            # Every row of the prompt is wanted, also those whose entries are there.
            held.cut_to(0)
        first_row = self._first_rows.take(held)
        if first_row is None:
            held.cut_to_ledger()
        proposed = list(command.proposal.token_ids)
        feed = held.session.tokens[held.table.length :] + proposed
        job = Job(held, feed, rows=len(proposed) + (first_row is None), arrived=arrived, scored=scored)
        job.prefill_before = self.sequences.prefill_rows_since(arrived)
        self._rounds[command.sequence_id] = r = Round(command, job, first_row=first_row)
        self._gathering.back(command.sequence_id, r.rows, arrived)
        return [] if first_row is None else self._conclude(r, first_row)

    def _conclude(self, r: Round, row: FirstRow) -> list[TargetEvent]:
        """The verdict of a round that its first row decides alone; none where that takes a pass."""
        proposed, session = r.command.proposal.token_ids, r.job.held.session
        case = Case(session.params, session.tokens, NOTHING)
        if proposed and (not case.target_decides or row.verdict == (0, proposed[0])):
            return []
        if proposed:
            r.job.sequences_in_pass = 1  # what drafting takes is less by that
        judged = together_or_alone(
            [r], row.logits, [1], lambda _, logits: reported([case], logits, [row.verdict]), JUDGING
        )
        return self._answer([r], judged, 0.0)

    def _foresee(self, command: VerifyAhead) -> None:
        """Keep the next round for the outcomes told, until the verdict is out."""
        r = self._rounds.get(command.sequence_id)
        if r is None or place(r.command) != place(command):
            return
        for (accepted, _), proposal in command.proposals.items():
            self._check(after(command, accepted, proposal), r.job.held)
        longest = command.base_length + r.command.proposal.num_draft_tokens + 1
        if command.plain_otherwise and longest > self._max_model_len:
            raise InvalidArgumentError(
                "plain_otherwise", f"may go on beyond the model's length of {self._max_model_len}"
            )
        r.foreseen.update(command.proposals)
        r.plain_otherwise = r.plain_otherwise or command.plain_otherwise

    def _begin_late(self, command: VerifyAhead, arrived: float) -> list[TargetEvent]:
        """The verdict is out already, and what it would have begun begins now.

        The coordinator knows it: what it told and the verdict did not make use of is still to be read here.
        """
        held = self.sequences.find(command.sequence_id)
        if held is None:
            return []
        following = following_late(command, held.session, self._eos_token_ids)
        return [] if following is None else self._begin(following, arrived)

    def _listen(self) -> None:
        """Take up what arrived for the rounds of this pass while it ran: after their verdicts it is late.

        Every command is also handled in its turn. So what came before its round was taken up is not lost, and
        what is refused is refused there.
        """
        while self._overheard:
            with contextlib.suppress(PacelineError):
                self._foresee(self._overheard.popleft())

    def _check(self, command: VerifyRound, held: HeldSequence[Verdict]) -> None:
        """Refuse what the model cannot judge, before it costs a pass or touches the session."""
        proposal = command.proposal
        check_token_ids("committed_tail", command.committed_tail, self._vocabulary_size)
        check_token_ids("proposal.token_ids", proposal.token_ids, self._vocabulary_size)
        if proposal.parents:
            raise InvalidArgumentError("proposal.parents", "this worker verifies chains only")
        if command.base_length + proposal.num_draft_tokens > self._max_model_len:
            raise InvalidArgumentError(
                "proposal.token_ids", f"end beyond the model's length of {self._max_model_len}"
            )
        if proposal.distributions:
            if held.session.params.mode is AcceptanceMode.COUPLED:
                raise InvalidArgumentError("proposal.distributions", "have no meaning in coupled mode")
            check_sparse(proposal.distributions, self._vocabulary_size, proposal.token_ids)

    def step(self) -> list[TargetEvent]:
        """Run one pass over the rounds in progress; return the verdicts it made possible."""
        if not self._rounds:
            self._first_rows.compute()
            return []
        begun = self._clock()
        jobs = [r.job for r in self._rounds.values()]
        reading = reads(jobs)
        passes = self.observer.passes["rounds"]
        result = run_pass(
            jobs, self._runner, self._budget, self._clock, self.sequences, beside=self._beside, passes=passes
        )
        events: list[TargetEvent] = [self._fail(job, error) for job, error in result.failed]
        for part in result.scored:
            try:
                events.append(prompt_logprobs(part, self._rounds[part.job.sequence_id].command.round))
            except Exception as error:
                part.job.held.found_broken()
                events.append(self._fail(part.job, own_error(error, JUDGING, part.job.sequence_id)))
        if result.finished:
            events.extend(self._restrict(result.finished))
            events.extend(self._judge(result))
            if not reading:
                self._gathering.cost.observe(result.finished[0].rows_in_pass, self._clock() - begun)
        if result.finished or result.scored:
            self.sequences.looked_at(self._clock())
        return events

    def _restrict(self, finished: Sequence[Job]) -> list[TargetEvent]:
        """Settle what the rows of each may be; one whose grammar gives up fails.

        Together they have the time of one: the rest of the pass waits, and all that come after it. Beyond
        that each has the row that plain decoding has.
        """
        events: list[TargetEvent] = []
        begun = self._clock()
        for job in finished:
            r = self._rounds.get(job.sequence_id)
            state, session = job.held.grammar, job.held.session
            if state is None or r is None:
                continue
            drafts = r.command.proposal.token_ids
            try:
                left = limits.MAX_STRUCTURE_SECONDS - (self._clock() - begun)
                r.restriction = restriction(
                    state, session.params, session.tokens, drafts, self._eos_token_ids, seconds=left
                )
            except Exception as error:
                events.append(self._fail(job, own_error(error, JUDGING, job.sequence_id)))
        return events

    def _judge(self, result: PassResult) -> list[TargetEvent]:
        begun = self._clock()
        rounds, logits = with_known_rows(*in_progress(result, self._rounds))
        if not rounds:
            return []
        judged = together_or_alone(
            rounds,
            logits,
            [r.rows for r in rounds],
            lambda some, rows: judgements(some, rows, self._eos_token_ids),
            JUDGING,
        )
        return self._answer(rounds, judged, self._clock() - begun)

    def _answer(
        self, rounds: Sequence[Round], judged: Sequence[Judgement | PacelineError | None], spent: float
    ) -> list[TargetEvent]:
        """Settle what was judged, and begin what follows it by itself."""
        self._listen()
        now = self._clock()
        events: list[TargetEvent] = []
        for r, judgement in zip(rounds, judged, strict=True):
            r.job.compute += spent
            if judgement is None:
                r.job.held.found_broken()
                if r.take_apart():
                    continue
                if r.job.reused:
                    # Others' entries, which nobody may have looked at yet: is it this one that is broken?
                    r.job.compute_again(r.command.proposal.token_ids)
                    continue
            if judgement is None or isinstance(judgement, PacelineError):
                events.append(self._fail(r.job, judgement or InternalError(NO_CHOICE)))
                continue
            del self._rounds[r.command.sequence_id]
            outcome, told = judgement
            verdict = self._settle(r, *outcome, told)
            following = r.following(outcome, self._eos_token_ids)
            if following is not None:
                self._begin(following, now)
                verdict = replace(verdict, went_on_with=following.proposal.num_draft_tokens)
            else:
                self._gathering.answered(r.command.sequence_id, r.rows, now)
                self._first_rows.expect(r.job.held)
            events.append(RoundVerdict(r.command.sequence_id, r.command.epoch, r.command.round, verdict))
        return events

    def _settle(
        self, r: Round, num_accepted: int, next_token: int, logprobs: tuple[TokenLogprobs, ...]
    ) -> Verdict:
        """Take the accepted tokens into the session, roll the cache back, store the answer."""
        held, command = r.job.held, r.command
        tokens = (*command.proposal.token_ids[:num_accepted], next_token)
        held.session.tokens.extend(tokens)
        held.cut_to(command.base_length + num_accepted)
        held.found_sound()
        verdict = Verdict(num_accepted, tokens, held.table.length, r.job.timings(), logprobs)
        held.session.finish(verdict)
        if held.session.params.traceparent:
            self._trace(r, verdict.timings, {"paceline.num_accepted_tokens": num_accepted})
        return verdict

    def _trace(self, r: Round, timings: Timings, about: Attributes, error: str = "") -> None:
        """Tell whoever traces the request of this round."""
        params, k = r.job.held.session.params, r.command.proposal.num_draft_tokens
        attributes: Attributes = {"paceline.num_draft_tokens": k, **timings_told(timings), **about}
        where = params.traceparent, r.command.sequence_id, r.command.round
        self.observer.answered(*where, r.job.arrived, self._clock(), attributes, error)

    def _fail(self, job: Job, error: PacelineError) -> TargetEvent:
        """End a round without a verdict; the sequence stays, cut back to its ledger."""
        r = self._rounds.pop(job.sequence_id)
        if job.held.session.params.traceparent:
            self._trace(r, job.timings(), {}, code_name(error))
        job.held.cut_to_ledger()
        job.held.session.abandon_round()
        return SequenceFailed(r.command.sequence_id, r.command.epoch, r.command.round, error)

    def _leave(self, sequence_id: str) -> None:
        """Forget what is in progress for a sequence."""
        self._rounds.pop(sequence_id, None)
        self._gathering.gone(sequence_id)
        self._first_rows.gone(sequence_id)

    def drop(self, sequence_id: str) -> None:
        """Forget a sequence whose coordinator went away."""
        self._leave(sequence_id)
        self.sequences.drop(sequence_id)

    def expire(self) -> None:
        """Drop the sequences whose lease is over, except those being computed."""
        for sequence_id in self.sequences.expired():
            if sequence_id not in self._rounds:
                self.drop(sequence_id)
