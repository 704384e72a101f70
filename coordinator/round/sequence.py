"""One sequence as the coordinator holds it, and how it comes to its end. Pure; round.py moves it on."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field

from coordinator.proposers.prompt_lookup import Match, TextIndex
from coordinator.sequence.ledger import Ledger
from coordinator.sequence.messages import Action, Deadlines, Fail, Phase, ToDraft, ToTarget
from coordinator.sequence.round_record import RoundRecord
from coordinator.sequence.stats import RoundTimes, SpeculationStats
from coordinator.sequence.worker_view import DraftPeer, TargetPeer
from coordinator.speculation.controller import Controller
from coordinator.speculation.policy import FixedLength, Policy
from paceline.core.errors import InternalError, PacelineError
from paceline.core.types import Proposal, SequenceParams

MAX_LOSSES = 8
"""Target workers that may be lost in one round before the sequence fails: its round may be what kills them.
Restarts of several workers, one after another, must stay below."""


@dataclass(slots=True)
class Sequence:
    """One sequence: its ledger, its workers, where it stands."""

    sequence_id: str
    ledger: Ledger
    params: SequenceParams
    num_speculative_tokens: int
    """The most draft tokens of a round; 0 needs no draft worker."""
    deadlines: Deadlines
    vocabulary_size: int
    target_max_len: int
    draft_max_len: int = 0
    prompt_lookup: bool = False
    """Draft tokens may be copied from the sequence's own text."""
    phase: Phase = Phase.NEW
    round: int = 0
    deadline: float | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    times: RoundTimes = field(default_factory=RoundTimes)
    policy: InitVar[Policy | None] = None
    """Chooses K; None takes `num_speculative_tokens` in every round."""
    _policy: Policy = field(init=False)
    _target: TargetPeer = field(init=False)
    _draft: DraftPeer = field(init=False)
    _proposal: Proposal = field(default_factory=Proposal)
    _foreseen: dict[tuple[int, int], Proposal] = field(default_factory=dict)
    """What the target was told to judge next, by the outcome of this round: the longest for each."""
    _first_told: dict[tuple[int, int], int] = field(default_factory=dict)
    """Draft tokens of what it was told first for each."""
    _wanted: int = 0
    _planned: int | None = None
    _text: TextIndex = field(default_factory=TextIndex)
    _source: Match | None = None
    """Where the text went like this before, if this round's proposal is a copy of what followed."""
    _plain_ahead: bool = False
    """The target was told that it need not be asked for a round without draft tokens after this one."""
    _source_ahead: Match | None = None
    """Where what it was told to judge after this round was copied from; None where the draft foresaw it."""
    _chosen: int = 0
    """K of the next round, when it had to be known before the present one's verdict."""
    _lacked: int = 0
    """Ledger tokens that the draft did not have when this round's proposal was asked for."""
    _prefills: bool = False
    """The target computes the sequence from its beginning in this round."""
    _client_behind: bool = False
    _record: RoundRecord = field(default_factory=RoundRecord)
    committed: RoundRecord | None = None
    """The round that was committed last; whoever has told of it sets None."""

    def __post_init__(self, policy: Policy | None) -> None:
        """Nothing is known of the workers."""
        k = self.num_speculative_tokens
        self._policy = policy if policy is not None else FixedLength(Controller(k), k)
        self._target, self._draft = TargetPeer(self.sequence_id), DraftPeer(self.sequence_id)

    @property
    def holds_target(self) -> bool:
        """True while the sequence may hold blocks on its target worker."""
        return self._target.open and self.phase is not Phase.WAITING

    @property
    def unfinished(self) -> RoundRecord | None:
        """The round that has begun and is not committed."""
        return self._record if self._record.number and not self._record.num_tokens else None

    @property
    def losses(self) -> int:
        """Target workers that were lost in this round."""
        return self._target.losses

    def await_turn(self, now: float) -> None:
        """A target is there, and others go first: the time to wait for one begins anew."""
        if self.phase is Phase.STALLED:
            self.deadline = now + self.deadlines.recovery

    def give_up(self, error: PacelineError) -> list[Action]:
        """The shell knows that the sequence cannot go on."""
        return [] if self.phase is Phase.DONE else self._fail(error)

    def _room(self, more: int = 0) -> int:
        """Draft tokens there is room for once the ledger has grown by `more` tokens; may be negative."""
        return min(self._room_on_target(more), self.draft_max_len - len(self.ledger) - more + 1)

    def _room_on_target(self, more: int = 0) -> int:
        return min(self.ledger.remaining - more - 1, self.target_max_len - len(self.ledger) - more)

    def _stall(self, now: float) -> None:
        """No target worker: keep everything, and wait for one up to the recovery deadline."""
        self.phase, self.deadline = Phase.STALLED, now + self.deadlines.recovery
        self._policy.on_suspend()

    def _lose_target(self, now: float) -> list[Action]:
        """The target worker is gone, perhaps by what this sequence asked of it."""
        self._target.lose()
        if self.phase is Phase.VERIFYING:
            self._target.losses += 1
            if self._target.losses >= MAX_LOSSES:
                why = f"{MAX_LOSSES} times the target worker was lost in the same round"
                return self._fail(InternalError(why))
        if self.phase in (Phase.VERIFYING, Phase.WAITING):
            self._stall(now)
        return []

    def _leave_target(self, now: float) -> list[Action]:
        """It is there, and another one takes the sequence."""
        closing = self._close_target()
        self._target.lose()
        self._stall(now)
        return closing

    def _ask_again(self, now: float) -> list[Action]:
        """The same round: who computes it says nothing to that, who has its verdict says it again."""
        self.deadline = now + self.deadlines.target
        commands = self._target.verify(self.ledger, self.params, self.round, self._proposal)
        return [ToTarget(command) for command in commands]

    def _close_target(self) -> list[Action]:
        return [ToTarget(command) for command in self._target.closing()]

    def _close_draft(self) -> list[Action]:
        return [ToDraft(command) for command in self._draft.closing()]

    def _finish(self, now: float, *, goes_on: bool) -> list[Action]:
        """The ledger has ended, and a target that `goes_on` has begun a round behind that end."""
        if goes_on:
            since = self._record.left_target
            self._record = RoundRecord(self.round + 1, now, target_since=since)
        return self._close()

    def _close(self) -> list[Action]:
        """Both workers may forget the sequence."""
        actions = [*self._close_target(), *self._close_draft()]
        self.phase, self.deadline = Phase.DONE, None
        self._policy.on_suspend()
        return actions

    def _fail(self, error: PacelineError) -> list[Action]:
        return [*self._close(), Fail(error)]
