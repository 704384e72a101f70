"""The round of one sequence, from proposal to commit, and everything that can go wrong in it.

A state machine without I/O, clock or randomness: events in, actions out. The shell carries the actions
out and brings the answers back. Read top to bottom it is the round:

    begin a round -> DRAFTING -> proposal -> VERIFYING -> verdict -> commit, emit -> begin the next

A proposal may also be copied from the sequence's own text (lookup.py): then nobody waits for the draft.

While a verification is in progress the draft may send continuations: proposals for its likely outcomes.
They are handed to the target, which begins the next round by itself when one of them comes true: with the
verdict, or as soon as it is told. The draft is told, and goes on from there. Where the next round is to be a
plain one, the target is told that, and begins it by itself as well.

| what happens | what the sequence does |
|---|---|
| the draft worker fails, hangs or is gone | the round goes on with an empty proposal |
| the target worker is gone | STALLED until one is ready, then reopened from the ledger, epoch + 1 |
| it is gone again and again in one round | the sequence fails: the round may be what kills it |
| it is late, but answers others | the round is sent again, or goes to another target worker |
| the target has no room beside older sequences | WAITING until blocks are free, then sent again |
| a worker lost the sequence | opened again from the ledger |
| a worker lacks tokens | the round is sent again with the tail it lacks |
| the client reads slowly | PAUSED between rounds until it caught up |

Nothing that was emitted is ever taken back: a verdict is committed whole (or clipped where the sequence
ends) before anything of it is emitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.round.next_round import NOTHING, Planner
from coordinator.sequence.messages import (
    Action,
    Emit,
    Event,
    FromDraft,
    FromTarget,
    Phase,
    Signal,
    TargetHangs,
    ToDraft,
    ToTarget,
    WaitForBlocks,
)
from coordinator.sequence.round_record import RoundRecord
from coordinator.sequence.validation import is_sensible, with_origins
from coordinator.speculation.policy import Verification
from paceline.core.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    StaleEpochError,
    UnavailableError,
)
from paceline.core.messages import Continuations, DraftProposal, PromptLogprobs, RoundVerdict, SequenceFailed
from paceline.core.types import Proposal

MAX_ATTEMPTS = 4
"""Times one round may be put to the target again before the sequence fails."""


@dataclass(slots=True)
class RoundMachine(Planner):
    """Runs the rounds of one sequence."""

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event; return what to do about it, in order."""
        if self.phase is Phase.DONE:
            return []
        match event:
            case Signal():
                return self._signal(event, now)
            case DraftProposal():
                return self._on_proposal(event, now)
            case Continuations():
                return self._foresee(event)
            case RoundVerdict():
                return self._on_verdict(event, now)
            case PromptLogprobs():
                return self._on_prompt_logprobs(event, now)
            case FromDraft():
                return self._on_draft_failure(event.failure, now)
            case FromTarget():
                return self._on_target_failure(event.failure, now)

    def _signal(self, signal: Signal, now: float) -> list[Action]:
        match signal:
            case Signal.TARGET_READY:
                self._target.ready = True
                return self._resume_on_target(now) if self.phase in (Phase.NEW, Phase.STALLED) else []
            case Signal.BLOCKS_FREED:
                return self._resume_on_target(now) if self.phase is Phase.WAITING else []
            case Signal.BLOCKS_WANTED:
                return self._yield_blocks()
            case Signal.CLIENT_CAUGHT_UP:
                self._client_behind = False
                return self._begin_round(now) if self.phase is Phase.PAUSED else []
            case Signal.DRAFT_LOST:
                self._draft.lose()
                return self._verify(NOTHING, now) if self.phase is Phase.DRAFTING else []
            case Signal.DEADLINE:
                return self._on_deadline(now)
            case Signal.CANCEL:
                return self._close()
        return self._note(signal, now)

    def _note(self, signal: Signal, now: float) -> list[Action]:
        """Signals that change what is believed, or who the target is."""
        match signal:
            case Signal.ADMITTED:
                if self.phase is Phase.NEW:
                    self.deadline = now + self.deadlines.recovery  # the time in the queue is not of it
            case Signal.TARGET_LOST:
                return self._lose_target(now)
            case Signal.TARGET_LATE:
                return self._ask_again(now)
            case Signal.TARGET_LEFT:
                return self._leave_target(now)
            case Signal.DRAFT_READY:
                self._draft.arrive()
            case Signal.CLIENT_BEHIND:
                self._client_behind = True
        return []

    # ---- the round, step by step -------------------------------------------------------------------

    def _begin_round(self, now: float) -> list[Action]:
        """Step 1: ask the draft for a proposal, unless the text has one or this round has none."""
        if self._client_behind:
            self.phase, self.deadline = Phase.PAUSED, None
            self._policy.on_suspend()
            return []
        self._wanted = self._next_round(now)
        proposal = self._copy_from_text()
        if self._wanted == 0 or proposal.num_draft_tokens:
            return self._verify(proposal, now)
        return self._ask_draft(now)

    def _next_round(self, now: float) -> int:
        """Count the round, and settle how many draft tokens it has."""
        self.round += 1
        self._source = self._source_ahead = None
        self._forget_foreseen()
        self._record = RoundRecord(self.round, now)
        self._target.attempts = 0
        self._draft.retried = False
        return self._wanted_now()

    def _ask_draft(self, now: float) -> list[Action]:
        draft = self._draft
        self._lacked = draft.unread(self.ledger)
        self._policy.on_draft_request(self._lacked)
        self.phase, self.deadline, draft.sent_at = Phase.DRAFTING, now + self.deadlines.draft, now
        return [ToDraft(c) for c in draft.ask(self.ledger, self.params, self.round, self._wanted)]

    def _on_proposal(self, event: DraftProposal, now: float) -> list[Action]:
        """Step 2: have the target judge the proposal."""
        if not (self.phase is Phase.DRAFTING and self._draft.answers(event, self.round)):
            return []
        waited = now - self._draft.sent_at
        self.times.draft_answered(waited, event.timings)
        self._record.drafted(waited, event.timings)
        if not is_sensible(event.proposal, self._wanted, self.vocabulary_size):
            return self._without_draft(now)
        self._draft.has_read(self.ledger)
        drafted, prefill = event.proposal.num_draft_tokens, event.timings.prefill
        self._policy.on_proposal(drafted, waited, self._lacked, prefill)
        return self._verify(event.proposal, now)

    def _foresee(self, event: Continuations) -> list[Action]:
        """Keep proposals for outcomes of the verification in progress, and hand them to the target.

        What is late is of no use.
        """
        if not (self.phase is Phase.VERIFYING and self._draft.answers(event, self.round)):
            return []
        if self._client_behind:
            return []
        if not self._wanted_next():
            return [] if self._plain_ahead else self._tell_ahead()
        usable = {
            outcome: cut
            for outcome, proposal in event.proposals.items()
            if (cut := self._shortened(proposal, outcome))
        }
        if not usable:
            return []
        self._tell(usable)
        return [ToTarget(self._target.ahead(self.ledger, self.round, usable))]

    def _went_on(self, proposal: Proposal, now: float, *, late: bool) -> list[Action]:
        """The target does not wait: the next round is in progress there, or will be as it reads what it was
        told. Where that was `late` it is asked as well, in case that it could not make use of it."""
        source, since = self._source_ahead, self._record.left_target
        self._next_round(now)
        self._record.target_since = since
        self._wanted, self._proposal = proposal.num_draft_tokens, proposal
        if proposal.num_draft_tokens and source is not None:
            self._copies(source)
        if self._is_drafted:
            self._hit(proposal)
        asked = self._target.verify(self.ledger, self.params, self.round, proposal) if late else []
        self._verifying(now, prefills=False)
        return [*map(ToTarget, asked), *self._look_ahead()]

    def _look_ahead(self) -> list[Action]:
        """A hit tells the draft which branch is its trunk; other rounds tell the target what is next."""
        if not self._is_drafted:
            return self._tell_ahead()
        return [self._follow(self._proposal)] if self._draft.open else []

    def _hit(self, proposal: Proposal) -> None:
        self._draft.has_read(self.ledger)
        self._record.hit = True
        self._policy.on_proposal(proposal.num_draft_tokens, 0.0, 0)

    def _follow(self, proposal: Proposal) -> Action:
        """Its trunk is the branch that came true; without an answer it looks ahead of that proposal."""
        num_draft = proposal.num_draft_tokens
        return ToDraft(self._draft.follow(self.ledger, self.round, num_draft, max(num_draft, self._chosen)))

    def _verify(self, proposal: Proposal, now: float) -> list[Action]:
        self._proposal = proposal
        if not self._target.ready:
            self._stall(now)
            return []
        if len(self.ledger) >= self.target_max_len:
            # The ledger ends by itself at the length that was promised; another target may serve less.
            why = f"the target worker that is there serves {self.target_max_len} tokens at most"
            return self._fail(UnavailableError(why, self.ledger.num_generated - 1))
        commands = self._target.verify(self.ledger, self.params, self.round, proposal)
        self._verifying(now, prefills=not self._target.computed)
        ahead = [] if self._is_drafted else self._tell_ahead()
        return [*(ToTarget(command) for command in commands), *ahead, *self._read_ahead()]

    def _read_ahead(self) -> list[Action]:
        """While the target reads the prompt the draft may do so as well, if the next round is to ask it."""
        draft = self._draft
        if self.round != 1 or draft.open or not draft.usable(self.round + 1) or not self._wanted_next():
            return []
        return [ToDraft(command) for command in draft.opening(self.ledger, self.params)]

    def _tell_ahead(self) -> list[Action]:
        """Where no draft is asked for the next round, the target need not be asked for it either."""
        if not self._plain_ahead:
            told = self._told_ahead()
            if told is None:
                return []
            self._tell(told)
            self._plain_ahead = True
        return [ToTarget(self._target.ahead(self.ledger, self.round, self._foreseen, plain_otherwise=True))]

    def _verifying(self, now: float, *, prefills: bool) -> None:
        self.phase, self.deadline, self._target.sent_at = Phase.VERIFYING, now + self.deadlines.target, now
        self._prefills = self._record.prefills = prefills
        self._policy.on_verify(self._proposal.num_draft_tokens, prefills=prefills, match_length=self._match)

    def _on_verdict(self, event: RoundVerdict, now: float) -> list[Action]:
        """Steps 3 and 4: commit, emit, and go on; each worker rolls its own cache back."""
        if not (self.phase is Phase.VERIFYING and self._target.answers(event, self.round)):
            return []
        verdict, waited = event.verdict, now - self._target.sent_at
        self.times.target_answered(waited, verdict.timings)
        if not self._fits(verdict):
            return self._fail(InternalError("the target worker's verdict does not fit its round"))
        num_draft = self._proposal.num_draft_tokens
        if self._is_drafted:
            self._draft.failures = 0
        if self.ledger.num_generated == 0:
            self.stats.cached_prompt_tokens = min(verdict.timings.cached_tokens, self.ledger.prompt_length)
        timing = None if self._prefills else Verification.of(waited, verdict.timings)
        # The policy learns from the whole verdict; what is counted is what is committed.
        self._policy.on_verdict(num_draft, verdict.num_accepted, timing, self._match)
        # The worker extended its own copy of the ledger with the same tokens.
        self._target.known, self._target.computed = len(self.ledger) + len(verdict.token_ids), True
        following, self._target.losses = self._following(verdict), 0
        commit = self.ledger.commit(with_origins(verdict, self._proposal), verdict.logprobs)
        self.committed = self._record.judged(now, waited, num_draft, verdict.timings, commit)
        self.stats.record(self.committed)
        if commit.finish is not None:
            return [Emit(commit), *self._finish(now, goes_on=following is not None)]
        if following is None:
            return [Emit(commit), *self._begin_round(now)]
        return [Emit(commit), *self._went_on(following, now, late=verdict.went_on_with is None)]

    def _on_prompt_logprobs(self, event: PromptLogprobs, now: float) -> list[Action]:
        """The prompt's prefill goes on, and reports what it passes.

        A refusal may be that of a round that came twice: what the other one reports is not said again.
        """
        asked = self.phase in (Phase.VERIFYING, Phase.WAITING)
        if not (asked and self._target.answers(event, self.round)):
            return []
        if self.phase is Phase.VERIFYING:
            self.deadline = now + self.deadlines.target
        report = self.ledger.report_prompt(event.start, event.logprobs)
        if report is None:
            return self._fail(InternalError("the target worker's log-probabilities do not fit the prompt"))
        return [Emit(report)] if report.prompt_logprobs else []

    # ---- what can go wrong -------------------------------------------------------------------------

    def _on_draft_failure(self, failure: SequenceFailed, now: float) -> list[Action]:
        """Losing a draft costs speed only."""
        if failure.epoch != self._draft.epoch or failure.round not in (0, self.round):
            return []
        drafting = self.phase is Phase.DRAFTING
        match failure.error:
            case NotFoundError() | StaleEpochError():
                self._draft.open = False
            case FailedPreconditionError(known_length=known):
                self._draft.behind(known, self.ledger)
            case _:
                # Closed, not just forgotten: the worker still holds its blocks.
                closing = self._close_draft()
                return [*closing, *(self._without_draft(now) if drafting else [])]
        if not drafting:
            return []
        if self._draft.retried:
            return self._without_draft(now)
        self._draft.retried = True
        return self._ask_draft(now)

    def _without_draft(self, now: float) -> list[Action]:
        """This round goes on alone, and so do the next few, twice as many after every failure."""
        self._draft.pause(self.round)
        return self._verify(NOTHING, now)

    def _on_target_failure(self, failure: SequenceFailed, now: float) -> list[Action]:
        if self.phase is not Phase.VERIFYING or failure.epoch != self._target.epoch:
            return []
        if failure.round not in (0, self.round):
            return []
        if isinstance(failure.error, ResourceExhaustedError):
            return self._wait_for_blocks(failure.round, failure.error)
        self._target.attempts += 1
        put = self._proposal
        match failure.error:
            case NotFoundError() | StaleEpochError():
                self._target.open = False
            case FailedPreconditionError(known_length=known):
                self._target.behind(known, self.ledger)
            case InvalidArgumentError() if self._proposal.num_draft_tokens:
                # The target finds the proposal wrong: do without it.
                self._drop_proposal()
            case InternalError() if self._proposal.num_draft_tokens and self.params.chooses:
                # Its model may break on tokens that it would not choose. Where tokens are drawn by ratios,
                # those that it does not break on would come too seldom.
                self._drop_proposal()
            case error:
                return self._fail(error)
        if self._target.attempts >= MAX_ATTEMPTS:
            return self._fail(InternalError("the target worker keeps refusing the round"))
        if self._proposal is not put:
            # It may have been asked twice. What it still says of that belongs to an epoch that is over.
            self._target.open = False
        return self._verify(self._proposal, now)

    def _wait_for_blocks(self, refused_round: int, error: ResourceExhaustedError) -> list[Action]:
        """Nothing is wrong with the round, so waiting does not count as an attempt.

        A worker that refused the round has freed the blocks; the sequence keeps its place among the others
        there. One that refused the opening never had it.
        """
        self.phase, self.deadline = Phase.WAITING, None
        self._policy.on_suspend()
        self._target.attempts = 0
        closing = self._close_target() if refused_round == 0 else []
        preempted, self._target.computed = self._target.computed, False
        return [*closing, WaitForBlocks(error, preempted)]

    def _yield_blocks(self) -> list[Action]:
        """While its client reads, others can use the room; it is computed again when the client caught up."""
        if self.phase is not Phase.PAUSED:
            return []
        return [*self._close_target(), *self._close_draft()]

    def _resume_on_target(self, now: float) -> list[Action]:
        """Open the sequence from the ledger, and put the round that was in progress again."""
        if self.round == 0:
            return self._begin_round(now)
        return self._verify(self._proposal, now)

    def _on_deadline(self, now: float) -> list[Action]:
        if self.deadline is None or now < self.deadline:
            return []
        match self.phase:
            case Phase.DRAFTING:
                return self._without_draft(now)
            case Phase.VERIFYING:
                return [TargetHangs()]
            case _:
                error = UnavailableError("no target worker came back in time", self.ledger.num_generated - 1)
                return self._fail(error)
