"""The target worker without sockets and threads: sequences in, verdicts out.

All ready sequences, with their different numbers of draft tokens, share one pass. The worker decides,
truncates its own cache to `ledger length - 1` entries, and only then answers.

While a round is in progress, the coordinator may send the proposals to judge next for some of its outcomes,
or say that the next round has none. The next round then begins together with the verdict, without a message.
If the proposals arrive just after the verdict, it begins then.
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
from paceline.core.types import Outcome, Timings, TokenLogprobs, Verdict
from paceline.engine.scheduling.mask import forced_tokens, grammar_for, restriction
from paceline.engine.scheduling.passes import Job, PassResult, own_error, run_pass, together_or_alone
from paceline.engine.scheduling.sequences import HeldSequence, HeldSequences
from paceline.engine.scheduling.session import Disposition, question_of
from paceline.grammar import Grammars
from paceline.rpc.codec import check_opening
from paceline.rpc.codec.status import code_name
from paceline.telemetry.span_interface import Attributes
from paceline.telemetry.worker import WorkerObserver, timings_told
from target_worker.acceptance.items import VerifyItem
from target_worker.batching_delay import BatchingDelay
from target_worker.limits import RoundLimits
from target_worker.preverify import PrecomputedRows
from target_worker.rounds import (
    NO_PROPOSAL,
    PrecomputedRow,
    VerifyInProgress,
    after,
    complete_rounds,
    finished_rounds,
    first_tokens,
    following_late,
    is_prefilling,
    is_scored,
    place,
)
from target_worker.runner import TargetRunner
from target_worker.verdicts import Judgement, prompt_logprobs, with_logprobs
from target_worker.verify import NO_CHOICE, verify_rounds

MAX_EARLY_COMMANDS = 4096
"""Commands that a pass in progress may use; the oldest are forgotten, and still handled in their turn."""
JUDGING = "judging"
"""The name of what follows a pass, in the log and in errors."""


class TargetEngine:
    """Judges proposals with the target model. Not thread-safe: the engine thread owns it."""

    def __init__(
        self,
        runner: TargetRunner,
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
        self._limits = RoundLimits(vocabulary_size, max_model_len, config.max_batch_tokens)
        self._eos_token_ids = tuple(eos_token_ids)
        self.grammars = grammars
        self._clock = clock
        self.observer = WorkerObserver() if observer is None else observer
        self.sequences: HeldSequences[Verdict] = HeldSequences(
            runner.new_states(prefix_cache=config.prefix_cache),
            config.max_sequences,
            clock,
            config.lease_seconds,
        )
        self._rounds: dict[str, VerifyInProgress] = {}
        self._early: deque[VerifyAhead] = deque(maxlen=MAX_EARLY_COMMANDS)
        """Commands that arrived since the last pass. Another thread adds to them."""
        self._delay = BatchingDelay()
        self._precomputed = PrecomputedRows(
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
    def max_tree_nodes(self) -> int:
        """Most nodes of a tree."""
        return self._limits.max_tree_nodes

    @property
    def has_work(self) -> bool:
        """True while a round waits for its verdict, or a sequence for its round."""
        return bool(self._rounds) or self._precomputed.has_work

    def batching_delay(self) -> float:
        """Seconds that the next pass may wait for rounds about to arrive; 0 while a prompt is read."""
        if not self._rounds:
            return self._precomputed.batching_delay()
        jobs = [r.job for r in self._rounds.values()]
        if is_prefilling(jobs):
            return 0.0
        return self._delay.seconds(sum(job.rows for job in jobs), self._clock())

    def reset_cancel(self) -> None:
        """The commands announced so far are about to be handled."""
        self._precomputed.cancel.reset()

    def notify(self, commands: Sequence[TargetCommand | SequenceFailed]) -> None:
        """Commands wait: they cancel what nobody asked for, and the pass in progress may use their proposals.

        Called from any thread.
        """
        self._precomputed.cancel.cancel()
        self._early.extend(command for command in commands if isinstance(command, VerifyAhead))

    def holds(self, sequence_id: str) -> bool:
        """True while the sequence has state here."""
        return sequence_id in self.sequences

    def handle(self, command: TargetCommand, arrived: float) -> list[TargetEvent]:
        """Handle a command. A refusal, or the answer to a repeated round, is returned at once."""
        try:
            match command:
                case OpenSequence():
                    self._open(command)
                case VerifyRound():
                    return self._begin(command, arrived)
                case VerifyAhead():
                    self._keep_next_proposals(command)
                    return self._begin_late(command, arrived)
                case CloseSequence():
                    if self.sequences.close(command):
                        self._leave(command.sequence_id)
        except PacelineError as error:
            round_number = command.round if isinstance(command, VerifyRound | VerifyAhead) else 0
            return [SequenceFailed(command.sequence_id, command.epoch, round_number, error)]
        return []

    def _open(self, command: OpenSequence) -> None:
        check_opening(command.token_ids, command.params, self._limits.vocabulary_size, self._eos_token_ids)
        grammar = grammar_for(command.params, self.grammars)
        held = self.sequences.find(command.sequence_id)
        if held is not None and held.session.epoch < command.epoch:
            self._rounds.pop(command.sequence_id, None)
            self._precomputed.gone(command.sequence_id)
        self.sequences.open(command, grammar)

    def _begin(self, command: VerifyRound, arrived: float) -> list[TargetEvent]:
        held = self.sequences.get(command.sequence_id)
        self._limits.check(command, held.session.params)
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
            # Every row of the prompt is wanted, also of the tokens that have entries.
            held.cut_to(0)
        precomputed, apart = self._precomputed.take(held), False
        if not self._fits(command, held):
            if held.session.params.target_decides:
                command = replace(command, proposal=NO_PROPOSAL)
            else:
                precomputed, apart = None, True
        if precomputed is None:
            held.cut_to_ledger()
        proposed = list(command.proposal.token_ids)
        feed = held.session.tokens[held.num_computed_tokens :] + proposed
        rows, parents = len(proposed) + (precomputed is None), command.proposal.parents
        job = Job(held, feed, rows=rows, arrived=arrived, scored=scored, parents=parents)
        job.prefill_before = self.sequences.prefill_rows_since(arrived)
        self._rounds[command.sequence_id] = r = VerifyInProgress(command, job, precomputed=precomputed)
        self._delay.back(command.sequence_id, r.rows, arrived)
        if apart and r.take_apart():
            job.scored = scored
        return [] if precomputed is None else self._conclude(r, precomputed)

    @staticmethod
    def _fits(command: VerifyRound, held: HeldSequence[Verdict]) -> bool:
        """False for a tree that the whole cache has no room for, though it may have room for a path.

        Where the target decides, the round then goes without it. Else its rows are computed apart, since to
        drop what was drawn would bias the output.
        """
        pool, proposal = held.table.pool, command.proposal
        entries = command.base_length + proposal.num_draft_tokens
        return not proposal.is_tree or entries <= pool.num_blocks * pool.block_size

    def _conclude(self, r: VerifyInProgress, row: PrecomputedRow) -> list[TargetEvent]:
        """The verdict of a round that its first row decides alone; none where a pass is needed."""
        proposal, session, outcome = r.command.proposal, r.job.held.session, row.outcome
        proposed = proposal.num_draft_tokens > 0
        if proposed and not session.params.target_decides:
            return []
        if outcome is not None and outcome.next_token in first_tokens(proposal):
            return []
        if proposed:
            r.job.sequences_in_pass = 1  # the verdict's timings say so: see Timings.sequences
        item = VerifyItem(session.params, session.tokens, NO_PROPOSAL)
        judged = together_or_alone(
            [r], row.logits, [1], lambda _, logits: with_logprobs([item], logits, [outcome]), JUDGING
        )
        return self._answer([r], judged, 0.0)

    def _keep_next_proposals(self, command: VerifyAhead) -> None:
        """Keep the proposals of the next round until the verdict is sent."""
        r = self._rounds.get(command.sequence_id)
        if r is None or place(r.command) != place(command):
            return
        for outcome, proposal in command.proposals.items():
            self._limits.check(after(command, outcome.num_accepted, proposal), r.job.held.session.params)
        longest = command.base_length + r.command.proposal.depth + 1
        if command.plain_otherwise and longest > self._limits.max_model_len:
            raise InvalidArgumentError(
                "plain_otherwise", f"may go on beyond the model's length of {self._limits.max_model_len}"
            )
        r.next_proposals.update(command.proposals)
        r.plain_otherwise = r.plain_otherwise or command.plain_otherwise

    def _begin_late(self, command: VerifyAhead, arrived: float) -> list[TargetEvent]:
        """Begin the next round where its proposals arrive after the verdict.

        The coordinator expects this: it knows which proposals the verdict did not use.
        """
        held = self.sequences.find(command.sequence_id)
        if held is None:
            return []
        following = following_late(command, held.session, self._eos_token_ids)
        return [] if following is None else self._begin(following, arrived)

    def _use_early_commands(self) -> None:
        """Use the proposals that arrived for the rounds of this pass while it ran, before their verdicts.

        Every command is also handled in its turn. So a command that came before its round began is not lost,
        and a refusal is answered there.
        """
        while self._early:
            with contextlib.suppress(PacelineError):
                self._keep_next_proposals(self._early.popleft())

    def step(self) -> list[TargetEvent]:
        """Run one pass over the rounds in progress; return the verdicts it made possible."""
        if not self._rounds:
            self._precomputed.compute()
            return []
        begun = self._clock()
        jobs = [r.job for r in self._rounds.values()]
        prefilling = is_prefilling(jobs)
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
            if not prefilling:
                self._delay.cost.observe(result.finished[0].rows_in_pass, self._clock() - begun)
        if result.finished or result.scored:
            self.sequences.looked_at(self._clock())
        return events

    def _restrict(self, finished: Sequence[Job]) -> list[TargetEvent]:
        """Compute what each round's grammar allows in its rows; a round whose grammar gives up fails.

        All of them share the time limit of one, since the rest of the pass waits, and all passes after it.
        Beyond the limit each round gets the one row that plain decoding needs.
        """
        events: list[TargetEvent] = []
        begun = self._clock()
        for job in finished:
            r = self._rounds.get(job.sequence_id)
            state, session = job.held.grammar, job.held.session
            if state is None or r is None:
                continue
            proposal = r.command.proposal
            try:
                left = limits.MAX_STRUCTURE_SECONDS - (self._clock() - begun)
                r.restriction = restriction(
                    state,
                    session.params,
                    session.tokens,
                    proposal.token_ids,
                    self._eos_token_ids,
                    parents=proposal.parents,
                    seconds=left,
                )
            except Exception as error:
                events.append(self._fail(job, own_error(error, JUDGING, job.sequence_id)))
        return events

    def _judge(self, result: PassResult) -> list[TargetEvent]:
        begun = self._clock()
        rounds, logits = complete_rounds(*finished_rounds(result, self._rounds))
        if not rounds:
            return []
        judged = together_or_alone(
            rounds,
            logits,
            [r.rows for r in rounds],
            lambda some, rows: verify_rounds(some, rows, self._eos_token_ids),
            JUDGING,
        )
        return self._answer(rounds, judged, self._clock() - begun)

    def _answer(
        self,
        rounds: Sequence[VerifyInProgress],
        judged: Sequence[Judgement | PacelineError | None],
        spent: float,
    ) -> list[TargetEvent]:
        """Settle the rounds that were judged, and begin those that follow them by themselves."""
        judged = self._with_paths_in_place(rounds, judged)
        self._use_early_commands()
        now = self._clock()
        events: list[TargetEvent] = []
        for r, judgement in zip(rounds, judged, strict=True):
            r.job.compute += spent
            if judgement is None:
                r.job.held.found_broken()
                if r.take_apart():
                    continue
                if r.job.reused:
                    # Its reused entries come from another sequence and may be what is broken.
                    r.job.compute_again(r.command.proposal.token_ids)
                    continue
            if judgement is None or isinstance(judgement, PacelineError):
                events.append(self._fail(r.job, judgement or InternalError(NO_CHOICE)))
                continue
            outcome, told = judgement
            if r.lacks_entries(outcome):
                continue
            del self._rounds[r.command.sequence_id]
            verdict = self._settle(r, outcome, told)
            following = r.following(outcome, self._eos_token_ids)
            if following is not None:
                self._begin(following, now)
                verdict = replace(verdict, went_on_with=following.proposal.num_draft_tokens)
            else:
                if forced := forced_tokens(r.job.held):
                    verdict = replace(verdict, forced_token_ids=forced)
                self._delay.answered(r.command.sequence_id, r.rows, now)
                self._precomputed.expect(r.job.held)
            events.append(RoundVerdict(r.command.sequence_id, r.command.epoch, r.command.round, verdict))
        return events

    def _with_paths_in_place(
        self, rounds: Sequence[VerifyInProgress], judged: Sequence[Judgement | PacelineError | None]
    ) -> Sequence[Judgement | PacelineError | None]:
        """Move the entries of the accepted paths of trees into their tables, in one copy.

        Returns the judgements; an error for each tree where that fails.
        """
        told = [None if isinstance(j, PacelineError) else j for j in judged]
        moves = [([], []) if j is None else r.moves(j[0]) for r, j in zip(rounds, told, strict=True)]
        sources, destinations = ([slot for move in moves for slot in move[i]] for i in range(2))
        if not sources:
            return judged
        try:
            self._runner.copy_slots(sources, destinations)
        except Exception as error:
            return [
                own_error(error, JUDGING, r.job.sequence_id) if move[0] else judgement
                for r, judgement, move in zip(rounds, judged, moves, strict=True)
            ]
        return judged

    def _settle(self, r: VerifyInProgress, outcome: Outcome, logprobs: tuple[TokenLogprobs, ...]) -> Verdict:
        """Add the accepted tokens to the session, roll the cache back, store the answer."""
        held, command, num_accepted = r.job.held, r.command, outcome.num_accepted
        proposal, base = command.proposal, command.base_length
        accepted = proposal.accepted(outcome)
        tokens = (*accepted, outcome.next_token)
        held.session.cached[base : base + num_accepted] = accepted
        held.session.tokens.extend(tokens)
        held.cut_to(base + num_accepted)
        held.found_sound()
        verdict = Verdict(
            num_accepted,
            tokens,
            held.num_computed_tokens,
            r.job.timings(),
            logprobs,
            accepted_nodes=proposal.path_to(outcome.last_node) if proposal.is_tree else (),
        )
        held.session.finish(verdict)
        if held.session.params.traceparent:
            self._trace(r, verdict.timings, {"paceline.num_accepted_tokens": num_accepted})
        return verdict

    def _trace(self, r: VerifyInProgress, timings: Timings, about: Attributes, error: str = "") -> None:
        """Report this round to the trace of its request."""
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
        """Forget the round in progress of a sequence, and what is known ahead of the next one."""
        self._rounds.pop(sequence_id, None)
        self._delay.gone(sequence_id)
        self._precomputed.gone(sequence_id)

    def drop(self, sequence_id: str) -> None:
        """Forget a sequence whose coordinator went away."""
        self._leave(sequence_id)
        self.sequences.drop(sequence_id)

    def expire(self) -> None:
        """Drop the sequences whose lease has expired, except those with a round in progress."""
        for sequence_id in self.sequences.expired():
            if sequence_id not in self._rounds:
                self.drop(sequence_id)
