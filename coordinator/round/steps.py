"""The steps of a round, from proposal to commit. Pure: events in, actions out. Read top to bottom:

    begin -> DRAFTING -> proposal -> VERIFYING -> verdict -> commit, emit -> begin the next

A context source (coordinator/proposers/) may make the proposal instead; DRAFTING is then skipped. Several
drafts are asked at once; the round waits for all, and their proposals are merged.

During a verification the draft may send continuations, which are proposals for its likely outcomes. They are
offered to the target. If one of these outcomes occurs, the target begins the next round by itself, with the
verdict or as soon as the offer arrives. The draft is told which outcome occurred and continues from there. If
the next round is plain, the target is told in advance and also begins it by itself.

Emitted tokens are never taken back: a verdict is committed, clipped where the sequence ends, before any of
its tokens is emitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.proposers.remote_draft import RemoteDraft, Wanted
from coordinator.round.next_round import NextRound
from coordinator.round.present_round import NOTHING, PresentRound
from coordinator.round.state import RoundState
from coordinator.sequence.messages import Action, Emit, Phase, ToDraft, ToTarget
from coordinator.sequence.round_record import RoundRecord
from coordinator.sequence.validation import is_sensible, with_origins
from coordinator.speculation.policy import Verification
from paceline.core.errors import InternalError, UnavailableError
from paceline.core.messages import Continuations, DraftProposal, PromptLogprobs, RoundVerdict
from paceline.core.types import Outcome, Proposal


@dataclass(frozen=True, slots=True)
class Steps:
    """The rounds of one sequence while nothing goes wrong."""

    state: RoundState

    def begin(self, now: float) -> list[Action]:
        """Step 1: take a context source's proposal, ask the draft for one, or begin a plain round."""
        state = self.state
        if state.client_behind:
            state.phase, state.deadline = Phase.PAUSED, None
            state.planner.policy.on_suspend()
            return []
        present = self._next_round(now)
        # The first round has no proposal of any source.
        guess = state.planner.guess(present.num_wanted) if present.number > 1 else None
        if guess is not None:
            present.propose(guess)
            return self.verify(present.proposal, now)
        return self._ask_drafts(now) if present.num_wanted else self.verify(NOTHING, now)

    def _next_round(self, now: float) -> PresentRound:
        """Start a new PresentRound with its number and K."""
        state = self.state
        number = state.present.number + 1
        state.target.attempts = 0
        state.drafts.begin_round()
        planned = state.next.num_wanted
        state.next = NextRound()
        wanted = state.planner.wanted_now(number, planned)
        shape = state.planner.shape(wanted)
        state.present = PresentRound(number, wanted, shape, record=RoundRecord(number, now))
        return state.present

    def _ask_drafts(self, now: float) -> list[Action]:
        state = self.state
        present = state.present
        wanted, rows = Wanted(present.num_wanted, present.shape), state.planner.rows(present.shape)
        asked = state.drafts.want(wanted, present.number, len(state.ledger), rows)
        return self.ask(asked, now) if asked else self.verify(NOTHING, now)

    def ask(self, drafts: Sequence[RemoteDraft], now: float) -> list[Action]:
        """Ask drafts for what is wanted of them, and set the deadline for their answers."""
        state = self.state
        unread = state.present.num_unread = max(draft.unread(state.ledger) for draft in drafts)
        state.planner.policy.on_draft_request(unread)
        state.phase = Phase.DRAFTING
        for draft in drafts:
            draft.sent_at = now
        return self._send(drafts, now)

    def _send(self, drafts: Sequence[RemoteDraft], now: float) -> list[Action]:
        state = self.state
        state.deadline = now + state.deadlines.draft
        place = state.ledger, state.params_of_draft, state.round
        return [ToDraft(command, draft.index) for draft in drafts for command in draft.ask(*place)]

    def on_late_drafts(self, now: float) -> list[Action]:
        """Answers are late: go on without them, or wait on where that would change the distribution.

        If the time of a proposal may depend on the tokens that are drawn, and late ones were left out, the
        others would not be draws from the q that the target is told. So where the target judges by q, the
        same round is sent again, in case a worker has lost it; only the loss of the worker ends the wait.
        """
        state = self.state
        late = state.drafts.awaited
        if not state.params_of_draft.target_decides and state.drafts.time_depends_on_draws:
            return self._send(late, now)
        for draft in late:
            draft.pause(state.round)
            draft.wanted = None
        return self._once_all_have_answered(now)

    def on_proposal(self, draft: RemoteDraft, event: DraftProposal, now: float) -> list[Action]:
        """Take the proposal of a draft that is awaited."""
        state = self.state
        wanted = draft.wanted
        if wanted is None or not draft.answers(event, state.round):
            return []
        state.present.record.drafted(now - draft.sent_at, event.timings)
        bounds = wanted.num_draft, state.planner.vocabulary_size, wanted.shape
        if not is_sensible(event.proposal, *bounds):
            return self.go_on_without(draft, now)
        draft.has_read(state.ledger)
        state.drafts.answered(draft, event.proposal)
        return self._once_all_have_answered(now)

    def _once_all_have_answered(self, now: float) -> list[Action]:
        """Step 2: if no draft is awaited any more, send what they propose together to the target."""
        state = self.state
        if state.drafts.awaited:
            return []
        proposal, record = state.drafts.proposal, state.present.record
        if record.draft is not None:  # of the last one that answered, for which the others waited
            state.times.draft_answered(record.draft_waited, record.draft)
            if state.drafts.has_answers:
                times = record.draft_waited, state.present.num_unread, record.draft.prefill
                state.planner.policy.on_proposal(proposal, *times)
        return self.verify(proposal, now)

    def go_on_without(self, draft: RemoteDraft, now: float) -> list[Action]:
        """Leave an awaited draft out of the round, and pause it; each failure doubles the pause."""
        draft.pause(self.state.round)
        return self.leave_out(draft, now)

    def leave_out(self, draft: RemoteDraft, now: float) -> list[Action]:
        """Await nothing of a draft any more. The round goes on with what the others propose."""
        was_awaited, draft.wanted = draft.wanted is not None, None
        return self._once_all_have_answered(now) if was_awaited else []

    def on_continuations(self, draft: RemoteDraft, event: Continuations) -> list[Action]:
        """Offer the draft's continuations to the target, for outcomes of the verification in progress.

        Late continuations are dropped, and those of one draft among several, whose nodes are not the round's.
        """
        state = self.state
        expected = state.phase is Phase.VERIFYING and state.drafts.alone is draft
        if not (expected and draft.answers(event, state.round)):
            return []
        if state.client_behind:
            return []
        wanted = self._wanted_next()
        if not wanted:
            return [] if state.next.plain_otherwise else self._offer_next_round()
        usable: dict[Outcome, Proposal] = {}
        for outcome, proposal in event.proposals.items():
            known = state.next.offered(outcome)
            if cut := state.planner.shortened(proposal, outcome, wanted, known):
                usable[outcome] = cut
        if not usable:
            return []
        state.next.offer(usable)
        return [ToTarget(state.target.ahead(state.ledger, state.round, usable))]

    def _wanted_next(self) -> int:
        state = self.state
        if state.next.num_wanted is None:
            state.next.num_wanted = state.planner.wanted_next(state.round)
        return state.next.num_wanted

    def _begin_early_round(self, proposal: Proposal, now: float, *, late: bool) -> list[Action]:
        """Enter the next round, which the target has begun by itself or begins when the offer arrives.

        If the offer may be `late`, the round is also sent, in case the target cannot use the offer.
        """
        state = self.state
        guess, since = state.next.guess, state.present.record.left_target
        draft = state.drafts.alone
        present = self._next_round(now)
        present.record.target_since = since
        present.num_wanted, present.proposal = proposal.depth, proposal
        if proposal.num_draft_tokens and guess is not None:
            present.propose(guess.cut(proposal.num_draft_tokens))
        if present.drafted and draft is not None:
            self._hit(draft, proposal)
        asked = state.target.verify(state.ledger, state.params, state.round, proposal) if late else []
        self._verifying(now, prefills=False)
        return [*map(ToTarget, asked), *self._look_ahead()]

    def _look_ahead(self) -> list[Action]:
        """After a hit, tell the draft to continue its branch; else offer the target the next round."""
        state = self.state
        draft = state.drafts.alone
        if draft is None:
            return self._offer_next_round()
        return [self._follow(draft, state.present.proposal)] if draft.open else []

    def _hit(self, draft: RemoteDraft, proposal: Proposal) -> None:
        state = self.state
        state.drafts.went_on(draft, proposal)
        draft.has_read(state.ledger)
        state.present.record.hit = True
        state.planner.policy.on_proposal(proposal, 0.0, 0)

    def _follow(self, draft: RemoteDraft, proposal: Proposal) -> Action:
        """Tell the draft which branch was right. The draft drafts ahead of it and sends no proposal."""
        state = self.state
        known = Wanted(proposal.depth, draft.within(state.present.shape))
        ahead = max(known.num_draft, state.planner.chosen)
        return ToDraft(draft.follow(state.ledger, state.round, known, ahead), draft.index)

    def verify(self, proposal: Proposal, now: float) -> list[Action]:
        """Send the round to the target. Without a target the sequence stalls and keeps the proposal."""
        state = self.state
        state.present.proposal = proposal
        if not state.target.ready:
            state.stall(now)
            return []
        if len(state.ledger) >= state.planner.target_max_len:
            # The request was checked against another target, which served a greater length.
            why = f"the present target worker serves {state.planner.target_max_len} tokens at most"
            return state.fail(UnavailableError(why, state.ledger.num_generated - 1))
        commands = state.target.verify(state.ledger, state.params, state.round, proposal)
        self._verifying(now, prefills=not state.target.computed)
        ahead = [] if state.present.drafted else self._offer_next_round()
        return [*(ToTarget(command) for command in commands), *ahead, *self._read_ahead()]

    def _read_ahead(self) -> list[Action]:
        """Let drafts prefill the prompt during the target's prefill, if the next round asks them."""
        state = self.state
        number = state.round + 1
        if state.round != 1 or not state.planner.asks(number) or not self._wanted_next():
            return []
        able = state.drafts.to_ask(number, len(state.ledger), state.planner.most_rows)
        known = state.ledger, state.params_of_draft
        return [ToDraft(command, draft.index) for draft in able for command in draft.opening(*known)]

    def _offer_next_round(self) -> list[Action]:
        """If the next round does not ask the draft, let the target begin that round by itself."""
        state = self.state
        if not state.next.plain_otherwise:
            # Without room there may be no next round at all.
            room = state.planner.room_on_target(1 + state.present.proposal.depth)
            if state.round == 1 or state.client_behind or room < 0 or self._wanted_next():
                return []
            if state.planner.awaits_verdict:
                return []
            if ahead := state.planner.guess_ahead(state.present):
                outcome, state.next.guess = ahead
                state.next.offer({outcome: state.next.guess.proposal})
            state.next.plain_otherwise = True
        return [
            ToTarget(state.target.ahead(state.ledger, state.round, state.next.offers, plain_otherwise=True))
        ]

    def _verifying(self, now: float, *, prefills: bool) -> None:
        state = self.state
        state.phase, state.deadline, state.target.sent_at = Phase.VERIFYING, now + state.deadlines.target, now
        state.present.prefills = state.present.record.prefills = prefills
        state.planner.policy.on_verify(state.present.proposal, prefills=prefills)

    def on_verdict(self, event: RoundVerdict, now: float) -> list[Action]:
        """Steps 3 and 4: commit, emit, and begin the next round. Each worker rolls back its own cache."""
        state = self.state
        if not (state.phase is Phase.VERIFYING and state.target.answers(event, state.round)):
            return []
        verdict, waited = event.verdict, now - state.target.sent_at
        state.times.target_answered(waited, verdict.timings)
        if not state.accepts(verdict):
            return state.fail(InternalError("the target worker's verdict does not fit its round"))
        proposal = state.present.proposal
        for draft in state.drafts.proposers if state.present.drafted else ():
            draft.failures = 0
        if state.ledger.num_generated == 0:
            state.stats.cached_prompt_tokens = min(verdict.timings.cached_tokens, state.ledger.prompt_length)
        timing = None if state.present.prefills else Verification.of(waited, verdict.timings)
        # The policy gets the whole verdict; the statistics count committed tokens only.
        state.planner.policy.on_verdict(proposal, verdict, timing, state.present.guess)
        # The worker extended its own copy of the ledger with the same tokens.
        state.target.known, state.target.computed = len(state.ledger) + len(verdict.token_ids), True
        following, state.target.losses = state.next.follows(verdict), 0
        commit = state.ledger.commit(with_origins(verdict, proposal), verdict.logprobs)
        state.committed = state.present.record.judged(now, waited, proposal, verdict.timings, commit)
        state.stats.record(state.committed)
        state.planner.on_verdict(verdict)
        if commit.finish is not None:
            return [Emit(commit), *state.finish(now, goes_on=following is not None)]
        if following is None:
            return [Emit(commit), *self.begin(now)]
        return [Emit(commit), *self._begin_early_round(following, now, late=verdict.went_on_with is None)]

    def on_prompt_logprobs(self, event: PromptLogprobs, now: float) -> list[Action]:
        """The target reports log-probabilities of the prompt while it prefills.

        They are also accepted while the sequence waits for blocks, because the round may have been sent twice
        and refused once.
        """
        state = self.state
        asked = state.phase in (Phase.VERIFYING, Phase.WAITING)
        if not (asked and state.target.answers(event, state.round)):
            return []
        if state.phase is Phase.VERIFYING:
            state.deadline = now + state.deadlines.target
        report = state.ledger.report_prompt(event.start, event.logprobs)
        if report is None:
            return state.fail(InternalError("the target worker's log-probabilities do not fit the prompt"))
        return [Emit(report)] if report.prompt_logprobs else []
