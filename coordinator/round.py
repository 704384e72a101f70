"""The round of one sequence, from proposal to commit, and everything that can go wrong in it.

A state machine without I/O, clock or randomness: events in, actions out. The shell carries the actions
out and brings the answers back. Read top to bottom it is the round:

    begin a round -> DRAFTING -> proposal -> VERIFYING -> verdict -> commit, emit -> begin the next

While a verification is in progress the draft may send continuations: proposals for its likely outcomes.
When the verdict is one of them the next round skips DRAFTING; the draft is told, and goes on from there.

| what happens | what the sequence does |
|---|---|
| the draft worker fails, hangs or is gone | the round goes on with an empty proposal |
| the target worker is gone | STALLED until one is ready, then reopened from the ledger, epoch + 1 |
| the target has no room | closed there, WAITING until blocks are free, then reopened |
| a worker lost the sequence | opened again from the ledger |
| a worker lacks tokens | the round is sent again with the tail it lacks |
| the client reads slowly | PAUSED between rounds until it caught up |

Nothing that was emitted is ever taken back: a verdict is committed whole (or clipped where the sequence
ends) before anything of it is emitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.events import (
    Action,
    Deadlines,
    Emit,
    Event,
    Fail,
    FromDraft,
    FromTarget,
    Phase,
    Signal,
    TargetHangs,
    ToDraft,
    ToTarget,
    WaitForBlocks,
)
from coordinator.ledger import Ledger
from coordinator.stats import RoundTimes, SpeculationStats
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
from paceline.core.messages import (
    CloseSequence,
    Continuations,
    DraftProposal,
    DraftRound,
    OpenSequence,
    RoundVerdict,
    SequenceFailed,
    VerifyRound,
)
from paceline.core.types import Proposal, SequenceParams, TokenOrigin, Verdict

MAX_ATTEMPTS = 4
"""Times one round may be put to the target again before the sequence fails."""
MAX_PAUSE_ROUNDS = 64
"""Longest pause, in rounds, after repeated failures of the draft."""


@dataclass(slots=True)
class _Peer:
    """What the machine believes of one worker."""

    ready: bool = False
    open: bool = False
    epoch: int = 0
    known: int = 0
    """Ledger tokens it has."""
    sent_at: float = 0.0


@dataclass(slots=True)
class RoundMachine:
    """One sequence."""

    sequence_id: str
    ledger: Ledger
    params: SequenceParams
    num_speculative_tokens: int
    deadlines: Deadlines
    vocabulary_size: int
    target_max_len: int
    draft_max_len: int = 0
    phase: Phase = Phase.NEW
    round: int = 0
    deadline: float | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    times: RoundTimes = field(default_factory=RoundTimes)
    _target: _Peer = field(default_factory=_Peer)
    _draft: _Peer = field(default_factory=_Peer)
    _proposal: Proposal = field(default_factory=Proposal)
    _foreseen: Mapping[tuple[int, int], Proposal] = field(default_factory=dict)
    _wanted: int = 0
    _attempts: int = 0
    _draft_retried: bool = False
    _draft_failures: int = 0
    _draft_paused_until: int = 0
    _client_behind: bool = False

    @property
    def holds_target(self) -> bool:
        """True while the sequence may hold blocks on its target worker."""
        return self._target.open

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
                self._foresee(event)
                return []
            case RoundVerdict():
                return self._on_verdict(event, now)
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
            case Signal.CLIENT_CAUGHT_UP:
                self._client_behind = False
                return self._begin_round(now) if self.phase is Phase.PAUSED else []
            case Signal.DRAFT_LOST:
                self._draft.ready, self._draft.open = False, False
                return self._verify(Proposal(), now) if self.phase is Phase.DRAFTING else []
            case Signal.DEADLINE:
                return self._on_deadline(now)
            case Signal.CANCEL:
                return self._close()
        self._note(signal, now)
        return []

    def _note(self, signal: Signal, now: float) -> None:
        """Signals that change what is believed and ask for nothing."""
        match signal:
            case Signal.TARGET_LOST:
                self._target.ready, self._target.open = False, False
                if self.phase in (Phase.VERIFYING, Phase.WAITING):
                    self._stall(now)
            case Signal.DRAFT_READY:
                self._draft.ready, self._draft.open = True, False
                self._draft_failures, self._draft_paused_until = 0, 0
            case Signal.CLIENT_BEHIND:
                self._client_behind = True

    # ---- the round, step by step -------------------------------------------------------------------

    def _begin_round(self, now: float, foreseen: Proposal | None = None) -> list[Action]:
        """Step 1: ask the draft for a proposal, unless it is there already or this round has none."""
        self._foreseen = {}
        if self._client_behind:
            self.phase, self.deadline = Phase.PAUSED, None
            return []
        self.round += 1
        self._attempts, self._draft_retried = 0, False
        self._wanted = self._choose_k()
        if self._wanted == 0:
            return self._verify(Proposal(), now)
        if foreseen is not None and self._draft.open:
            proposal = Proposal(foreseen.token_ids[: self._wanted])
            if self._is_sensible(proposal) and not foreseen.distributions:
                return self._go_on_with(proposal, now)
        return self._ask_draft(now)

    def _choose_k(self) -> int:
        """Draft tokens of this round.

        The first round has none: its target pass prefills the prompt, and no draft should delay the first
        token. The last rounds have fewer: tokens past `max_tokens` or a model's length are wasted.
        """
        if not self._draft.ready or self.round == 1 or self.round < self._draft_paused_until:
            return 0
        return max(
            0,
            min(
                self.num_speculative_tokens,
                self.ledger.remaining - 1,
                self.target_max_len - len(self.ledger),
                self.draft_max_len - len(self.ledger) + 1,
            ),
        )

    def _ask_draft(self, now: float) -> list[Action]:
        actions: list[Action] = []
        draft = self._draft
        if not draft.open:
            draft.epoch += 1
            draft.open, draft.known = True, len(self.ledger)
            actions.append(ToDraft(self._opening(draft)))
        command = DraftRound(
            self.sequence_id, draft.epoch, self.round, len(self.ledger), self._tail(draft), self._wanted
        )
        draft.known = len(self.ledger)
        self.phase, self.deadline, draft.sent_at = Phase.DRAFTING, now + self.deadlines.draft, now
        return [*actions, ToDraft(command)]

    def _on_proposal(self, event: DraftProposal, now: float) -> list[Action]:
        """Step 2: have the target judge the proposal."""
        if not (self.phase is Phase.DRAFTING and self._is_current(event, self._draft)):
            return []
        self.times.draft_answered(now - self._draft.sent_at, event.timings)
        if not self._is_sensible(event.proposal):
            return self._without_draft(now)
        self._draft_failures = 0
        return self._verify(event.proposal, now)

    def _foresee(self, event: Continuations) -> None:
        """Keep proposals for outcomes of the verification in progress; what is late is of no use."""
        if self.phase is Phase.VERIFYING and self._is_current(event, self._draft):
            self._foreseen = event.proposals

    def _go_on_with(self, proposal: Proposal, now: float) -> list[Action]:
        """A hit: the verification leaves at once, and the draft learns which branch is its trunk."""
        self.stats.num_lookahead_hits += 1
        verifying = self._verify(proposal, now)
        draft = self._draft
        command = DraftRound(
            self.sequence_id,
            draft.epoch,
            self.round,
            len(self.ledger),
            self._tail(draft),
            proposal.num_draft_tokens,
        )
        draft.known = len(self.ledger)
        return [*verifying, ToDraft(command)]

    def _is_sensible(self, proposal: Proposal) -> bool:
        return (
            not proposal.parents
            and proposal.num_draft_tokens <= self._wanted
            and all(0 <= token_id < self.vocabulary_size for token_id in proposal.token_ids)
        )

    def _verify(self, proposal: Proposal, now: float) -> list[Action]:
        self._proposal = proposal
        target = self._target
        if not target.ready:
            self._stall(now)
            return []
        actions: list[Action] = []
        if not target.open:
            target.epoch += 1
            target.open, target.known = True, len(self.ledger)
            actions.append(ToTarget(self._opening(target)))
        command = VerifyRound(
            self.sequence_id, target.epoch, self.round, len(self.ledger), self._tail(target), proposal
        )
        target.known = len(self.ledger)
        self.phase, self.deadline, target.sent_at = Phase.VERIFYING, now + self.deadlines.target, now
        return [*actions, ToTarget(command)]

    def _on_verdict(self, event: RoundVerdict, now: float) -> list[Action]:
        """Steps 3 and 4: commit, emit, and go on; each worker rolls its own cache back."""
        if not (self.phase is Phase.VERIFYING and self._is_current(event, self._target)):
            return []
        verdict = event.verdict
        self.times.target_answered(now - self._target.sent_at, verdict.timings)
        if not self._is_valid(verdict):
            return self._fail(InternalError("the target worker's verdict does not fit its round"))
        self.stats.record(self._proposal.num_draft_tokens, verdict.num_accepted)
        # The worker extended its own copy of the ledger with the same tokens.
        self._target.known = len(self.ledger) + len(verdict.token_ids)
        foreseen = self._foreseen.get((verdict.num_accepted, verdict.token_ids[-1]))
        commit = self.ledger.commit(self._with_origins(verdict))
        if commit.finish is not None:
            return [Emit(commit), *self._close()]
        return [Emit(commit), *self._begin_round(now, foreseen)]

    def _is_valid(self, verdict: Verdict) -> bool:
        accepted = verdict.num_accepted
        return (
            accepted <= self._proposal.num_draft_tokens
            and verdict.token_ids[:accepted] == self._proposal.token_ids[:accepted]
            and 0 <= verdict.token_ids[-1] < self.vocabulary_size
            and verdict.num_computed_tokens == len(self.ledger) + accepted
        )

    def _with_origins(self, verdict: Verdict) -> Sequence[tuple[int, TokenOrigin]]:
        if self._proposal.num_draft_tokens == 0:
            last = TokenOrigin.TARGET
        elif verdict.num_accepted == self._proposal.num_draft_tokens:
            last = TokenOrigin.BONUS
        else:
            last = TokenOrigin.CORRECTION
        origins = [*([TokenOrigin.ACCEPTED] * verdict.num_accepted), last]
        return list(zip(verdict.token_ids, origins, strict=True))

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
                self._draft.known = min(known, len(self.ledger))
            case _:
                # Closed, not just forgotten: the worker still holds its blocks.
                closing = self._close_draft()
                return [*closing, *(self._without_draft(now) if drafting else [])]
        if not drafting:
            return []
        if self._draft_retried:
            return self._without_draft(now)
        self._draft_retried = True
        return self._ask_draft(now)

    def _without_draft(self, now: float) -> list[Action]:
        """This round goes on alone, and so do the next few, twice as many after every failure."""
        pause = min(2**self._draft_failures, MAX_PAUSE_ROUNDS)
        self._draft_failures += 1
        self._draft_paused_until = self.round + 1 + pause
        return self._verify(Proposal(), now)

    def _on_target_failure(self, failure: SequenceFailed, now: float) -> list[Action]:
        if self.phase is not Phase.VERIFYING or failure.epoch != self._target.epoch:
            return []
        if failure.round not in (0, self.round):
            return []
        if isinstance(failure.error, ResourceExhaustedError):
            # Nothing is wrong with the round, so waiting does not count as an attempt.
            self.phase, self.deadline = Phase.WAITING, None
            return [*self._close_target(), WaitForBlocks(failure.error)]
        self._attempts += 1
        match failure.error:
            case NotFoundError() | StaleEpochError():
                self._target.open = False
            case FailedPreconditionError(known_length=known):
                self._target.known = min(known, len(self.ledger))
            case InvalidArgumentError() if self._proposal.num_draft_tokens:
                # The target finds the proposal wrong: do without it.
                self._proposal = Proposal()
            case error:
                return self._fail(error)
        if self._attempts >= MAX_ATTEMPTS:
            return self._fail(InternalError("the target worker keeps refusing the round"))
        return self._verify(self._proposal, now)

    def _stall(self, now: float) -> None:
        """No target worker: keep everything, and wait for one up to the recovery deadline."""
        self.phase, self.deadline = Phase.STALLED, now + self.deadlines.recovery

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
                self._note(Signal.TARGET_LOST, now)
                return [TargetHangs()]
            case _:
                error = UnavailableError("no target worker came back in time", self.ledger.num_generated - 1)
                return self._fail(error)

    # ---- opening and closing -----------------------------------------------------------------------

    def _opening(self, peer: _Peer) -> OpenSequence:
        return OpenSequence(self.sequence_id, peer.epoch, tuple(self.ledger.token_ids), self.params)

    def _tail(self, peer: _Peer) -> tuple[int, ...]:
        return tuple(self.ledger.token_ids[peer.known :])

    def _is_current(self, event: DraftProposal | Continuations | RoundVerdict, peer: _Peer) -> bool:
        return event.epoch == peer.epoch and event.round == self.round

    def _close_target(self) -> list[Action]:
        was_open, self._target.open = self._target.open, False
        if not (was_open and self._target.ready):
            return []
        return [ToTarget(CloseSequence(self.sequence_id, self._target.epoch))]

    def _close_draft(self) -> list[Action]:
        was_open, self._draft.open = self._draft.open, False
        if not (was_open and self._draft.ready):
            return []
        return [ToDraft(CloseSequence(self.sequence_id, self._draft.epoch))]

    def _close(self) -> list[Action]:
        """Both workers may forget the sequence."""
        actions = [*self._close_target(), *self._close_draft()]
        self.phase, self.deadline = Phase.DONE, None
        return actions

    def _fail(self, error: PacelineError) -> list[Action]:
        return [*self._close(), Fail(error)]

    def give_up(self, error: PacelineError) -> list[Action]:
        """The shell knows that the sequence cannot go on."""
        return [] if self.phase is Phase.DONE else self._fail(error)
