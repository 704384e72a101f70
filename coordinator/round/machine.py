"""The state machine of one sequence's rounds: events in, actions out, without I/O, clock or randomness.

The dispatcher carries out the actions and returns the workers' answers as events. steps.py implements a round
in which nothing fails. This module maps events to steps and handles failures:

| event | reaction of the sequence |
|---|---|
| a draft worker fails, hangs or is gone | the round goes on without its proposal |
| a proposal is late whose time may depend on its tokens, in ratio modes | the draft is asked again |
| the target worker is gone | STALLED until a target is ready; then it is reopened, epoch + 1 |
| that happens `MAX_LOSSES` times in one round | the sequence fails, because its round may crash targets |
| the target worker is late but answers others | the round is sent again, or goes to another target worker |
| a worker is stopping | the round goes on at another worker of the role, if one is ready |
| the target has no blocks beside older sequences | WAITING until blocks are free, then sent again |
| a worker lost the sequence | it is reopened from the ledger |
| a worker lacks tokens | the round is sent again with the missing tokens |
| the client reads slowly | PAUSED between rounds until the client has caught up |
"""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.proposers.remote_draft import RemoteDraft
from coordinator.round.state import RoundState
from coordinator.round.steps import Steps
from coordinator.sequence.messages import (
    Action,
    DraftLeft,
    DraftLost,
    DraftReady,
    Event,
    FromDraft,
    FromTarget,
    Phase,
    Signal,
    TargetHangs,
)
from paceline.core.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PacelineError,
    ResourceExhaustedError,
    StaleEpochError,
    UnavailableError,
)
from paceline.core.messages import Continuations, DraftProposal, PromptLogprobs, RoundVerdict, SequenceFailed

MAX_ATTEMPTS = 4
"""The sequence fails when the target has refused one round this many times."""


@dataclass(slots=True)
class RoundMachine:
    """Runs the rounds of one sequence."""

    state: RoundState
    steps: Steps = field(init=False)

    def __post_init__(self) -> None:
        """Create the steps, which act on the same state."""
        self.steps = Steps(self.state)

    def give_up(self, error: PacelineError) -> list[Action]:
        """End the sequence with an error that the dispatcher found."""
        state = self.state
        return [] if state.phase is Phase.DONE else state.fail(error)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Process one event. Returns the actions to carry out, in order."""
        state = self.state
        if state.phase is Phase.DONE:
            return []
        match event:
            case Signal():
                return self._signal(event, now)
            case FromDraft() | DraftReady() | DraftLost() | DraftLeft():
                return self._draft_event(state.drafts[event.draft], event, now)
            case RoundVerdict():
                return self.steps.on_verdict(event, now)
            case PromptLogprobs():
                return self.steps.on_prompt_logprobs(event, now)
            case FromTarget():
                return self._on_target_failure(event.failure, now)

    def _signal(self, signal: Signal, now: float) -> list[Action]:
        state = self.state
        match signal:
            case Signal.TARGET_READY:
                state.target.ready = True
                return self._resume_on_target(now) if state.phase in (Phase.NEW, Phase.STALLED) else []
            case Signal.BLOCKS_FREED:
                return self._resume_on_target(now) if state.phase is Phase.WAITING else []
            case Signal.BLOCKS_WANTED:
                return state.yield_blocks()
            case Signal.CLIENT_CAUGHT_UP:
                state.client_behind = False
                return self.steps.begin(now) if state.phase is Phase.PAUSED else []
            case Signal.DEADLINE:
                return self._on_deadline(now)
            case Signal.CANCEL:
                return state.close()
        return self._note(signal, now)

    def _note(self, signal: Signal, now: float) -> list[Action]:
        """Handle the signals that only update the state or concern the target."""
        state = self.state
        match signal:
            case Signal.ADMITTED:
                if state.phase is Phase.NEW:
                    state.deadline = now + state.deadlines.recovery  # time in the queue does not count
            case Signal.TARGET_LOST:
                return state.lose_target(now)
            case Signal.TARGET_LATE:
                return state.ask_again(now)
            case Signal.TARGET_LEFT:
                return state.leave_target(now)
            case Signal.CLIENT_BEHIND:
                state.client_behind = True
        return []

    def _draft_event(
        self, draft: RemoteDraft, event: FromDraft | DraftReady | DraftLost | DraftLeft, now: float
    ) -> list[Action]:
        match event:
            case FromDraft(event=DraftProposal() as proposal):
                return self.steps.on_proposal(draft, proposal, now)
            case FromDraft(event=Continuations() as continuations):
                return self.steps.on_continuations(draft, continuations)
            case FromDraft(event=SequenceFailed() as failure):
                return self._on_draft_failure(draft, failure, now)
            case DraftReady():
                draft.arrive()
                return []
            case _:
                closing = self.state.close_draft(draft) if isinstance(event, DraftLeft) else []
                draft.lose()
                return [*closing, *self.steps.leave_out(draft, now)]

    def _on_draft_failure(self, draft: RemoteDraft, failure: SequenceFailed, now: float) -> list[Action]:
        """Handle an error from a draft worker. It costs speed only."""
        state = self.state
        if failure.epoch != draft.epoch or failure.round not in (0, state.round):
            return []
        awaited = draft.wanted is not None
        match failure.error:
            case NotFoundError() | StaleEpochError():
                draft.open = False
            case FailedPreconditionError(known_length=known):
                draft.behind(known, state.ledger)
            case _:
                # The sequence is closed explicitly, because the worker still holds its blocks.
                closing = state.close_draft(draft)
                return [*closing, *(self.steps.go_on_without(draft, now) if awaited else [])]
        if not awaited:
            return []
        if draft.retried:
            return self.steps.go_on_without(draft, now)
        draft.retried = True
        return self.steps.ask([draft], now)

    def _on_target_failure(self, failure: SequenceFailed, now: float) -> list[Action]:
        state = self.state
        if state.phase is not Phase.VERIFYING or failure.epoch != state.target.epoch:
            return []
        if failure.round not in (0, state.round):
            return []
        if isinstance(failure.error, ResourceExhaustedError):
            return state.wait_for_blocks(failure.round, failure.error)
        state.target.attempts += 1
        put = state.present.proposal
        match failure.error:
            case NotFoundError() | StaleEpochError():
                state.target.open = False
            case FailedPreconditionError(known_length=known):
                state.target.behind(known, state.ledger)
            case InvalidArgumentError() if state.present.proposal.num_draft_tokens:
                # The target considers the proposal invalid: go on without it.
                state.drop_proposal()
            case InternalError() if state.present.proposal.num_draft_tokens and state.params.target_decides:
                # The model may fail on tokens that it would not choose. In modes that accept by probability
                # ratio, dropping the proposal would bias the output, so there the sequence fails.
                state.drop_proposal()
            case error:
                return state.fail(error)
        if state.target.attempts >= MAX_ATTEMPTS:
            return state.fail(InternalError("the target worker keeps refusing the round"))
        if state.present.proposal is not put:
            # The round may have been sent twice. A new epoch makes late answers to it stale.
            state.target.open = False
        return self.steps.verify(state.present.proposal, now)

    def _resume_on_target(self, now: float) -> list[Action]:
        """Reopen the sequence from the ledger, and resend the round that was in progress."""
        state = self.state
        if state.round == 0:
            return self.steps.begin(now)
        return self.steps.verify(state.present.proposal, now)

    def _on_deadline(self, now: float) -> list[Action]:
        state = self.state
        if state.deadline is None or now < state.deadline:
            return []
        match state.phase:
            case Phase.DRAFTING:
                return self.steps.on_late_drafts(now)
            case Phase.VERIFYING:
                return [TargetHangs()]
            case _:
                error = UnavailableError("no target worker came back in time", state.ledger.num_generated - 1)
                return state.fail(error)
