"""The state of one sequence's rounds, with the transitions that suspend or end it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field

from coordinator.proposers.drafts import Drafts
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
from paceline.core import limits
from paceline.core.errors import InternalError, PacelineError, ResourceExhaustedError
from paceline.core.types import SequenceParams, Verdict

MAX_LOSSES = 8
"""A sequence fails when its target is lost this many times in one round, because the round may crash targets.
Restarting several workers one after another must not reach this number."""


@dataclass(slots=True)
class RoundState:
    """The state of one sequence's rounds.

    It consists of the ledger, a view of each worker, the present round, early decisions about the next round,
    and the planner, which chooses the source of each proposal.
    """

    sequence_id: str
    ledger: Ledger
    params: SequenceParams
    num_speculative_tokens: InitVar[int]
    policy: InitVar[Policy]
    deadlines: Deadlines
    vocabulary_size: InitVar[int]
    target_max_len: InitVar[int]
    sources: InitVar[Sequence[ContextSource]] = ()
    asks_draft: InitVar[bool] = True
    num_drafts: InitVar[int] = 1
    """Draft workers that may propose for one round."""
    max_tree_nodes: InitVar[int] = limits.MAX_TREE_NODES
    """Most draft tokens of a round with a tree or with several drafts."""
    draft_params: SequenceParams | None = None
    """The parameters that the draft gets; None for those of the target."""
    phase: Phase = Phase.NEW
    deadline: float | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    times: RoundTimes = field(default_factory=RoundTimes)
    committed: RoundRecord | None = None
    """The last committed round. The dispatcher reads it and sets it to None."""
    target: TargetView = field(init=False)
    drafts: Drafts = field(init=False)
    planner: Planner = field(init=False)
    present: PresentRound = field(default_factory=PresentRound)
    next: NextRound = field(default_factory=NextRound)
    client_behind: bool = False
    """The client has too many unread tokens."""

    def __post_init__(
        self,
        num_speculative_tokens: int,
        policy: Policy,
        vocabulary_size: int,
        target_max_len: int,
        sources: Sequence[ContextSource],
        asks_draft: bool,
        num_drafts: int,
        max_tree_nodes: int,
    ) -> None:
        """Create views of unknown workers, and pass the other arguments to the planner."""
        self.target, self.drafts = TargetView(self.sequence_id), Drafts.make(self.sequence_id, num_drafts)
        self.planner = Planner(
            self.ledger,
            self.drafts,
            policy,
            sources,
            num_speculative_tokens,
            vocabulary_size,
            target_max_len,
            max_tree_nodes,
            self.params.judged_as.facts.takes_trees,
            asks_draft,
        )

    @property
    def params_of_draft(self) -> SequenceParams:
        """How the draft draws."""
        return self.draft_params or self.params

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
        """The round that has begun and is not committed; None if there is none."""
        record = self.present.record
        return record if record.number and not record.num_tokens else None

    @property
    def losses(self) -> int:
        """Target workers that were lost in this round."""
        return self.target.losses

    def await_turn(self, now: float) -> None:
        """Restart the recovery deadline, because a target is ready but serves other sequences first."""
        if self.phase is Phase.STALLED:
            self.deadline = now + self.deadlines.recovery

    def wait_for_blocks(self, refused_round: int, error: ResourceExhaustedError) -> list[Action]:
        """Wait for free blocks. The round itself is valid, so this does not count as an attempt.

        A worker that refused the round (`refused_round` > 0) has freed its blocks and keeps the sequence's
        place among the others. A worker that refused the opening never had the sequence.
        """
        self.phase, self.deadline = Phase.WAITING, None
        self.planner.policy.on_suspend()
        self.target.attempts = 0
        closing = self.close_target() if refused_round == 0 else []
        preempted, self.target.computed = self.target.computed, False
        return [*closing, WaitForBlocks(error, preempted)]

    def yield_blocks(self) -> list[Action]:
        """Free both caches while the client is behind. They are recomputed after it has caught up."""
        if self.phase is not Phase.PAUSED:
            return []
        return [*self.close_target(), *self.close_drafts()]

    def drop_proposal(self) -> None:
        """Drop this round's proposal, which the target refused.

        The drafts that made it are paused and their continuations are discarded: each refusal makes the
        target read the whole ledger again.
        """
        if self.present.drafted:
            for draft in self.drafts.proposers:
                draft.pause(self.round)
            self.next = NextRound()
        self.present.drop_proposal()

    def stall(self, now: float) -> None:
        """Wait for a target worker until the recovery deadline, and keep the state."""
        self.phase, self.deadline = Phase.STALLED, now + self.deadlines.recovery
        self.planner.policy.on_suspend()

    def lose_target(self, now: float) -> list[Action]:
        """Handle the loss of the target worker, which this sequence's round may have caused."""
        self.target.lose()
        if self.phase is Phase.VERIFYING:
            self.target.losses += 1
            if self.target.losses >= MAX_LOSSES:
                why = f"{MAX_LOSSES} times the target worker was lost in the same round"
                return self.fail(InternalError(why))
        self._wait_for_target(now)
        return []

    def leave_target(self, now: float) -> list[Action]:
        """Close the sequence on a live target, because another target takes it over."""
        closing = self.close_target()
        self.target.lose()
        self._wait_for_target(now)
        return closing

    def _wait_for_target(self, now: float) -> None:
        """Stall if the target worker that is gone was to answer, or to tell of free blocks."""
        if self.phase in (Phase.VERIFYING, Phase.WAITING):
            self.stall(now)

    def ask_again(self, now: float) -> list[Action]:
        """Resend the round. The target ignores it while computing, and repeats the verdict if it has one."""
        self.deadline = now + self.deadlines.target
        commands = self.target.verify(self.ledger, self.params, self.round, self.present.proposal)
        return [ToTarget(command) for command in commands]

    def close_target(self) -> list[Action]:
        return [ToTarget(command) for command in self.target.closing()]

    def close_draft(self, draft: RemoteDraft) -> list[Action]:
        return [ToDraft(command, draft.index) for command in draft.closing()]

    def close_drafts(self) -> list[Action]:
        return [action for draft in self.drafts.views for action in self.close_draft(draft)]

    def finish(self, now: float, *, goes_on: bool) -> list[Action]:
        """Close after the ledger has ended. If the target `goes_on`, it has begun one more round."""
        self.planner.on_end()
        if goes_on:
            since = self.present.record.left_target
            self.present.record = RoundRecord(self.round + 1, now, target_since=since)
        return self.close()

    def close(self) -> list[Action]:
        """End the sequence and close it on its workers."""
        actions = [*self.close_target(), *self.close_drafts()]
        self.phase, self.deadline = Phase.DONE, None
        self.planner.policy.on_suspend()
        return actions

    def fail(self, error: PacelineError) -> list[Action]:
        return [*self.close(), Fail(error)]

    def accepts(self, verdict: Verdict) -> bool:
        """True if the verdict is valid for the round in progress."""
        wants_logprobs = self.params.sampling.logprobs is not None
        return (
            verdict_fits(verdict, self.present.proposal, len(self.ledger), self.planner.vocabulary_size)
            and bool(verdict.logprobs) == wants_logprobs
            and not self.ledger.lacks_prompt_logprobs
            and self.next.permits(verdict)
        )
