"""One sequence as its rounds act on it, and how it comes to its end. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field

from coordinator.proposers.interface import ContextSource
from coordinator.proposers.remote_draft import RemoteDraft
from coordinator.round.next_round import NextRound
from coordinator.round.planner import Planner
from coordinator.round.present_round import PresentRound
from coordinator.sequence.ledger import Ledger
from coordinator.sequence.messages import Action, Deadlines, Fail, Phase, ToDraft, ToTarget, WaitForBlocks
from coordinator.sequence.round_record import RoundRecord
from coordinator.sequence.stats import RoundTimes, SpeculationStats
from coordinator.sequence.validation import verdict_fits
from coordinator.sequence.worker_view import TargetView
from coordinator.speculation.policy import Policy
from paceline.core.errors import InternalError, PacelineError, ResourceExhaustedError
from paceline.core.types import SequenceParams, Verdict

MAX_LOSSES = 8
"""Target workers that may be lost in one round before the sequence fails: its round may be what kills them.
Restarts of several workers, one after another, must stay below."""


@dataclass(slots=True)
class RoundState:
    """One sequence as its rounds act on it.

    Its parts: the ledger, a view of each worker, the present round, what is settled of the next one, and a
    planner, which decides who proposes.
    """

    sequence_id: str
    ledger: Ledger
    params: SequenceParams
    num_speculative_tokens: InitVar[int]
    policy: InitVar[Policy]
    deadlines: Deadlines
    vocabulary_size: InitVar[int]
    target_max_len: InitVar[int]
    draft_max_len: InitVar[int] = 0
    sources: InitVar[Sequence[ContextSource]] = ()
    phase: Phase = Phase.NEW
    deadline: float | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    times: RoundTimes = field(default_factory=RoundTimes)
    committed: RoundRecord | None = None
    """The round that was committed last; whoever has told of it sets None."""
    target: TargetView = field(init=False)
    draft: RemoteDraft = field(init=False)
    planner: Planner = field(init=False)
    present: PresentRound = field(default_factory=PresentRound)
    next: NextRound = field(default_factory=NextRound)
    client_behind: bool = False
    """Its client has too much to read."""

    def __post_init__(
        self,
        num_speculative_tokens: int,
        policy: Policy,
        vocabulary_size: int,
        target_max_len: int,
        draft_max_len: int,
        sources: Sequence[ContextSource],
    ) -> None:
        """Nothing is known of the workers. The planner has the rest: see there."""
        self.target, self.draft = TargetView(self.sequence_id), RemoteDraft(self.sequence_id)
        self.planner = Planner(
            self.ledger,
            self.draft,
            policy,
            sources,
            num_speculative_tokens,
            vocabulary_size,
            target_max_len,
            draft_max_len,
        )

    @property
    def round(self) -> int:
        """The present round's number; 0 before the first."""
        return self.present.number

    @property
    def holds_target(self) -> bool:
        """True while the sequence may hold blocks on its target worker."""
        return self.target.open and self.phase is not Phase.WAITING

    @property
    def unfinished(self) -> RoundRecord | None:
        """The round that has begun and is not committed."""
        record = self.present.record
        return record if record.number and not record.num_tokens else None

    @property
    def losses(self) -> int:
        """Target workers that were lost in this round."""
        return self.target.losses

    def await_turn(self, now: float) -> None:
        """A target is there, and others go first: the time to wait for one begins anew."""
        if self.phase is Phase.STALLED:
            self.deadline = now + self.deadlines.recovery

    def wait_for_blocks(self, refused_round: int, error: ResourceExhaustedError) -> list[Action]:
        """Nothing is wrong with the round, so waiting does not count as an attempt.

        A worker that refused the round has freed the blocks; the sequence keeps its place among the others
        there. One that refused the opening never had it.
        """
        self.phase, self.deadline = Phase.WAITING, None
        self.planner.policy.on_suspend()
        self.target.attempts = 0
        closing = self.close_target() if refused_round == 0 else []
        preempted, self.target.computed = self.target.computed, False
        return [*closing, WaitForBlocks(error, preempted)]

    def yield_blocks(self) -> list[Action]:
        """While its client reads, others can use the room; it is computed again when the client caught up."""
        if self.phase is not Phase.PAUSED:
            return []
        return [*self.close_target(), *self.close_draft()]

    def drop_proposal(self) -> None:
        """The target refuses this round's proposal.

        If the draft made it, the draft is left alone for a while, and its continuations are not used: every
        such round has the target read the whole ledger.
        """
        if self.present.drafted:
            self.draft.pause(self.round)
            self.next = NextRound()
        self.present.drop_proposal()

    def stall(self, now: float) -> None:
        """No target worker: keep everything, and wait for one up to the recovery deadline."""
        self.phase, self.deadline = Phase.STALLED, now + self.deadlines.recovery
        self.planner.policy.on_suspend()

    def lose_target(self, now: float) -> list[Action]:
        """The target worker is gone, perhaps by what this sequence asked of it."""
        self.target.lose()
        if self.phase is Phase.VERIFYING:
            self.target.losses += 1
            if self.target.losses >= MAX_LOSSES:
                why = f"{MAX_LOSSES} times the target worker was lost in the same round"
                return self.fail(InternalError(why))
        if self.phase in (Phase.VERIFYING, Phase.WAITING):
            self.stall(now)
        return []

    def leave_target(self, now: float) -> list[Action]:
        """It is there, and another one takes the sequence."""
        closing = self.close_target()
        self.target.lose()
        self.stall(now)
        return closing

    def ask_again(self, now: float) -> list[Action]:
        """The same round: who computes it says nothing to that, who has its verdict says it again."""
        self.deadline = now + self.deadlines.target
        commands = self.target.verify(self.ledger, self.params, self.round, self.present.proposal)
        return [ToTarget(command) for command in commands]

    def close_target(self) -> list[Action]:
        return [ToTarget(command) for command in self.target.closing()]

    def close_draft(self) -> list[Action]:
        return [ToDraft(command) for command in self.draft.closing()]

    def finish(self, now: float, *, goes_on: bool) -> list[Action]:
        """The ledger has ended, and a target that `goes_on` has begun a round behind that end."""
        if goes_on:
            since = self.present.record.left_target
            self.present.record = RoundRecord(self.round + 1, now, target_since=since)
        return self.close()

    def close(self) -> list[Action]:
        """Both workers may forget the sequence."""
        actions = [*self.close_target(), *self.close_draft()]
        self.phase, self.deadline = Phase.DONE, None
        self.planner.policy.on_suspend()
        return actions

    def fail(self, error: PacelineError) -> list[Action]:
        return [*self.close(), Fail(error)]

    def accepts(self, verdict: Verdict) -> bool:
        """True for a verdict that the round in progress can have."""
        wants_logprobs = self.params.sampling.logprobs is not None
        return (
            verdict_fits(verdict, self.present.proposal, len(self.ledger), self.planner.vocabulary_size)
            and bool(verdict.logprobs) == wants_logprobs
            and not self.ledger.lacks_prompt_logprobs
            and self.next.permits(verdict)
        )
