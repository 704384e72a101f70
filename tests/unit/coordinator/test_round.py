"""The round machine, transition by transition (the table in its docstring)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.proposers.prompt_lookup import PromptLookup
from coordinator.proposers.remote_draft import MAX_PAUSE_ROUNDS
from coordinator.round.machine import MAX_ATTEMPTS
from coordinator.round.state import MAX_LOSSES, RoundState
from coordinator.sequence.messages import (
    Action,
    DraftLost,
    DraftReady,
    Emit,
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
    VerifyAhead,
    VerifyRound,
)
from paceline.core.types import AcceptanceMode, FinishReason, Proposal, Timings, TokenOrigin, Verdict
from tests.unit.coordinator.machines import make_machine

PROMPT = (1, 2, 3)
VOCAB = 20
EOS = 19


class Driver:
    """A machine with short words for what happens to it."""

    def __init__(
        self, k: int = 3, target_max_len: int = 100, draft_max_len: int = 100, **sampling: Any
    ) -> None:
        lengths = {"max_model_len": target_max_len, "draft_max_len": draft_max_len}
        options = {"max_tokens": 50} | sampling
        self.machine = make_machine(PROMPT, k, eos=[EOS], vocabulary=VOCAB, **lengths, **options)
        self.now = 0.0

    @property
    def state(self) -> RoundState:
        return self.machine.state

    def take_policy(self, policy: Any) -> None:
        """Another one chooses K from now on."""
        self.state.planner.policy = policy

    def take_sources(self) -> None:
        """Every context source may propose from now on."""
        self.state.planner.sources = [PromptLookup()]

    def __call__(self, event: Any) -> list[Action]:
        """Answers of a draft are those of the first one."""
        if isinstance(event, DraftProposal | Continuations):
            event = FromDraft(event)
        return self.machine.handle(event, self.now)

    @property
    def phase(self) -> Phase:
        return self.state.phase

    @property
    def length(self) -> int:
        return len(self.state.ledger)

    @property
    def generated(self) -> list[int]:
        return self.state.ledger.token_ids[len(PROMPT) :]

    def propose(
        self, *token_ids: int, epoch: int = 1, number: int | None = None, proposal: Proposal | None = None
    ) -> list[Action]:
        known = self.length + max(len(token_ids) - 1, 0)
        proposal = Proposal(token_ids) if proposal is None else proposal
        return self(DraftProposal("s", epoch, self._round(number), self.length, proposal, known))

    def judge(
        self, *token_ids: int, epoch: int = 1, number: int | None = None, computed: int | None = None
    ) -> list[Action]:
        accepted = len(token_ids) - 1
        length = self.length + accepted if computed is None else computed
        return self(RoundVerdict("s", epoch, self._round(number), Verdict(accepted, token_ids, length)))

    def target_fails(self, error: PacelineError, epoch: int = 1, number: int | None = None) -> list[Action]:
        return self(FromTarget(SequenceFailed("s", epoch, self._round(number), error)))

    def draft_fails(self, error: PacelineError, epoch: int = 1, number: int | None = None) -> list[Action]:
        return self(FromDraft(SequenceFailed("s", epoch, self._round(number), error)))

    def _round(self, number: int | None) -> int:
        return self.state.round if number is None else number


def sent(actions: list[Action]) -> list[Any]:
    """The commands among the actions, but for "the next round is plain" (test_rounds_ahead.py has these)."""
    commands = [a.command for a in actions if isinstance(a, ToTarget | ToDraft)]
    return [c for c in commands if not (isinstance(c, VerifyAhead) and c.plain_otherwise)]


def error_of(actions: list[Action]) -> Exception:
    """What a sequence fails with."""
    (failed,) = [action for action in actions if isinstance(action, Fail)]
    return failed.error


def prefilling(*, draft: bool = True, **options: Any) -> Driver:
    """A machine whose first round is with the target."""
    it = Driver(**options)
    if draft:
        it(DraftReady())
    it(Signal.TARGET_READY)
    return it


def drafting(**options: Any) -> Driver:
    """A machine that waits for its first proposal, in round 2."""
    it = prefilling(**options)
    it.judge(4)
    assert it.phase is Phase.DRAFTING
    return it


def verifying(*proposal: int, **options: Any) -> Driver:
    """A machine that waits for the verdict on a proposal, in round 2."""
    it = drafting(**options)
    it.propose(*proposal)
    assert it.phase is Phase.VERIFYING
    return it


def test_nothing_happens_before_a_target_is_ready() -> None:
    it = Driver()
    for signal in (
        DraftReady(),
        DraftLost(),
        Signal.TARGET_LOST,
        Signal.BLOCKS_FREED,
        Signal.CLIENT_CAUGHT_UP,
        Signal.DEADLINE,
    ):
        assert it(signal) == []
    assert it.phase is Phase.NEW


def test_the_first_round_prefills_target_and_draft() -> None:
    it = Driver()
    it(DraftReady())
    opening = OpenSequence("s", 1, PROMPT, it.state.params)
    assert it(Signal.TARGET_READY) == [
        ToTarget(opening),
        ToTarget(VerifyRound("s", 1, 1, 3, (), Proposal())),
        ToDraft(opening),
    ]
    assert (it.phase, it.state.deadline) == (Phase.VERIFYING, 10.0)


@pytest.mark.parametrize("why", ["no draft tokens", "no draft", "no room"])
def test_a_draft_that_will_not_be_used_is_not_opened(why: str) -> None:
    it = Driver(k=0 if why == "no draft tokens" else 3, max_tokens=2 if why == "no room" else 50)
    if why != "no draft":
        it(DraftReady())
    actions = it(Signal.TARGET_READY)
    assert actions
    assert not any(isinstance(action, ToDraft) for action in actions)


def test_losing_the_target_does_not_reopen_the_draft() -> None:
    it = prefilling()
    it(Signal.TARGET_LOST)
    assert not any(isinstance(action, ToDraft) for action in it(Signal.TARGET_READY))


def test_a_draft_arriving_meanwhile_drafts_the_second_round() -> None:
    it = prefilling(draft=False)
    it(DraftReady())
    _, *asked = it.judge(4)
    assert sent(asked) == [
        OpenSequence("s", 1, (1, 2, 3, 4), it.state.params),
        DraftRound("s", 1, 2, 4, (), 3),
    ]


def test_a_round_drafts_verifies_and_commits() -> None:
    it = prefilling()
    emit, *asked = it.judge(4)
    assert emit.commit.origins == (TokenOrigin.TARGET,)
    assert sent(asked) == [DraftRound("s", 1, 2, 4, (4,), 3)]
    assert (it.phase, it.state.deadline) == (Phase.DRAFTING, 1.0)
    # The target committed the token itself, so it lacks nothing.
    assert sent(it.propose(5, 6, 7)) == [VerifyRound("s", 1, 2, 4, (), Proposal((5, 6, 7)))]
    emit, *asked = it.judge(5, 9)
    assert emit.commit.token_ids == (5, 9)
    assert emit.commit.origins == (TokenOrigin.ACCEPTED, TokenOrigin.CORRECTION)
    # The draft lacks the committed tokens, by absolute position.
    assert sent(asked) == [DraftRound("s", 1, 3, 6, (5, 9), 3)]


def test_a_round_is_committed_then_emitted_then_continued() -> None:
    """The accepted draft tokens and the bonus."""
    it = verifying(5, 6, 7)
    actions = it.judge(5, 6, 7, 8)
    assert [type(a) for a in actions] == [Emit, ToDraft]
    assert actions[0].commit.token_ids == (5, 6, 7, 8)
    assert actions[0].commit.origins == (TokenOrigin.ACCEPTED,) * 3 + (TokenOrigin.BONUS,)
    assert it.generated == [4, 5, 6, 7, 8]
    assert it.state.stats.mean_acceptance_length == 4


@pytest.mark.parametrize(("told", "counted"), [(0, 0), (2, 2), (9, len(PROMPT))])
def test_the_first_verdict_reports_cached_tokens(told: int, counted: int) -> None:
    """Later verdicts may find entries of the sequence itself."""
    it = prefilling(draft=False, k=0)
    for number, cached in ((1, told), (2, 3)):
        verdict = Verdict(0, (4,), it.length, Timings(cached_tokens=cached))
        it(RoundVerdict("s", 1, number, verdict))
    assert it.state.stats.cached_prompt_tokens == counted


@pytest.mark.parametrize("ending", [(5, EOS, 7, 8), (5, 6, 7, EOS)])
def test_a_final_verdict_is_clipped_and_closes_both_workers(ending: tuple[int, ...]) -> None:
    it = verifying(*ending[:3])
    emit, *rest = it.judge(*ending)
    kept = ending[: ending.index(EOS) + 1]
    assert emit.commit.token_ids == kept
    assert emit.commit.finish is not None
    assert rest == [ToTarget(CloseSequence("s", 1)), ToDraft(CloseSequence("s", 1))]
    assert (it.phase, it.state.deadline) == (Phase.DONE, None)
    assert it.judge(1) == it(Signal.CANCEL) == it.machine.give_up(InternalError("x")) == []


# ---- choosing K -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"k": 5}, 5),
        ({"k": 5, "max_tokens": 4}, 2),  # 1 is generated; the target adds one itself
        ({"k": 5, "target_max_len": 7, "max_tokens": None}, 2),
        ({"k": 5, "draft_max_len": 5}, 2),  # 4 + 2 - 1 entries
    ],
)
def test_draft_tokens_are_limited_to_what_is_usable(options: dict[str, Any], wanted: int) -> None:
    it = prefilling(**options)
    (*_, command) = sent(it.judge(4))
    assert isinstance(command, DraftRound)
    assert command.num_draft_tokens == wanted


@pytest.mark.parametrize("options", [{"k": 0}, {"k": 5, "max_tokens": 2}, {"draft_max_len": 3}])
def test_a_round_without_room_for_a_draft_is_plain(options: dict[str, Any]) -> None:
    it = prefilling(**options)
    assert sent(it.judge(4)) == [VerifyRound("s", 1, 2, 4, (), Proposal())]


def test_without_a_draft_worker_every_round_is_plain() -> None:
    it = prefilling(draft=False)
    for token in (4, 5, 6):
        (command,) = sent(it.judge(token))
        assert command.proposal == Proposal()
    assert it.state.stats.num_rounds == 3


# ---- the draft fails, hangs or is gone ------------------------------------------------------------


def test_a_round_goes_on_after_losing_its_draft() -> None:
    it = drafting()
    assert sent(it(DraftLost())) == [VerifyRound("s", 1, 2, 4, (), Proposal())]
    assert it(DraftReady()) == []
    (command,) = sent(it.judge(5))
    assert command == VerifyRound("s", 1, 3, 5, (), Proposal()), "the round after it was settled by then"
    opening, command = sent(it.judge(6))
    assert opening == OpenSequence("s", 2, (1, 2, 3, 4, 5, 6), it.state.params)
    assert (command.epoch, command.round) == (2, 4)


def test_a_hanging_draft_is_awaited_until_its_deadline() -> None:
    it = drafting()
    it.now = 0.99
    assert it(Signal.DEADLINE) == []
    it.now = 1.0
    assert sent(it(Signal.DEADLINE)) == [VerifyRound("s", 1, 2, 4, (), Proposal())]
    assert it.propose(5, 6) == []  # too late
    assert it.phase is Phase.VERIFYING


def test_a_failing_drafts_pauses_double() -> None:
    it = drafting(max_tokens=400, target_max_len=1000, draft_max_len=1000)
    pauses = []
    for _ in range(8):
        it.now += 1.0
        it(Signal.DEADLINE)
        plain = 0
        while it.phase is Phase.VERIFYING:
            it.judge(5)
            plain += it.phase is Phase.VERIFYING
        pauses.append(plain)
    assert pauses == [1, 2, 4, 8, 16, 32, MAX_PAUSE_ROUNDS, MAX_PAUSE_ROUNDS]
    it.propose(6)
    it.judge(6, 7)
    it.now += 1.0
    it(Signal.DEADLINE)
    it.judge(5)
    it.judge(5)
    assert it.phase is Phase.DRAFTING, "a proposal in between starts the pauses over"


def test_a_draft_without_the_sequence_is_reopened_once() -> None:
    it = drafting()
    opening, command = sent(it.draft_fails(NotFoundError("gone")))
    assert opening == OpenSequence("s", 2, (1, 2, 3, 4), it.state.params)
    assert command == DraftRound("s", 2, 2, 4, (), 3)
    assert it.draft_fails(NotFoundError("gone"), epoch=1) == []  # of the first opening
    assert sent(it.draft_fails(NotFoundError("gone"), epoch=2)) == [VerifyRound("s", 1, 2, 4, (), Proposal())]


def test_a_draft_lacking_tokens_gets_the_tail() -> None:
    it = drafting()
    error = FailedPreconditionError("gap", known_length=2)
    assert sent(it.draft_fails(error)) == [DraftRound("s", 1, 2, 4, (3, 4), 3)]


@pytest.mark.parametrize(
    "error", [InternalError("nan"), ResourceExhaustedError("full"), InvalidArgumentError("x", "y")]
)
def test_a_failing_draft_is_closed_and_the_round_goes_on(error: PacelineError) -> None:
    it = drafting()
    assert it.draft_fails(error) == [
        ToDraft(CloseSequence("s", 1)),
        ToTarget(VerifyRound("s", 1, 2, 4, (), Proposal())),
        ToTarget(VerifyAhead("s", 1, 2, 4, {}, plain_otherwise=True)),
    ]


def test_a_failed_drafts_blocks_are_freed_at_the_end() -> None:
    """They must not wait for the lease to expire."""
    it = drafting()
    closed = it.draft_fails(InternalError("nan"))
    closed += it.judge(EOS)
    assert [a for a in closed if isinstance(a, ToDraft)] == [ToDraft(CloseSequence("s", 1))]


def test_a_stale_draft_failure_is_ignored() -> None:
    it = drafting()
    assert it.draft_fails(InternalError("late"), number=1) == []
    assert it.draft_fails(InternalError("late"), epoch=7) == []
    assert it.phase is Phase.DRAFTING
    it.propose(5)
    it.judge(5, 6)
    assert it.phase is Phase.DRAFTING
    assert it.state.round == 3


@pytest.mark.parametrize(
    "proposal", [Proposal((5, 6, 7, 8)), Proposal((VOCAB,)), Proposal((5, 6), parents=(-1, -1))]
)
def test_an_invalid_proposal_is_dropped(proposal: Proposal) -> None:
    it = drafting()
    actions = it(DraftProposal("s", 1, 2, 4, proposal, 4))
    assert sent(actions) == [VerifyRound("s", 1, 2, 4, (), Proposal())]


def test_an_answer_of_another_round_or_epoch_is_dropped() -> None:
    it = drafting()
    assert it.propose(5, number=1) == it.propose(5, epoch=2) == it.judge(5) == []
    it.propose(5)
    assert it.propose(6) == it.judge(5, 6, number=1) == it.judge(5, 6, epoch=2) == []
    assert (it.phase, it.generated) == (Phase.VERIFYING, [4])


# ---- the target is gone ---------------------------------------------------------------------------


def test_a_round_resumes_from_the_ledger_after_a_lost_target() -> None:
    it = verifying(5, 6)
    it.now = 3.0
    assert it(Signal.TARGET_LOST) == []
    assert (it.phase, it.state.deadline) == (Phase.STALLED, 103.0)
    assert it.judge(5, 6, 7) == []  # of a worker that is gone
    opening, command = sent(it(Signal.TARGET_READY))
    assert opening == OpenSequence("s", 2, (1, 2, 3, 4), it.state.params)
    assert command == VerifyRound("s", 2, 2, 4, (), Proposal((5, 6)))
    assert it.judge(5, 9, epoch=1) == []
    it.judge(5, 9, epoch=2)
    assert it.generated == [4, 5, 9]


def test_a_target_lost_while_drafting_stalls_the_round() -> None:
    it = drafting()
    assert it(Signal.TARGET_LOST) == []
    assert it.phase is Phase.DRAFTING
    assert it.propose(5) == []
    assert it.phase is Phase.STALLED
    assert it(DraftLost()) == []
    opening, command = sent(it(Signal.TARGET_READY))
    assert (opening.epoch, command.proposal) == (2, Proposal((5,)))


def test_a_target_returning_while_drafting_is_reopened() -> None:
    it = drafting()
    it(Signal.TARGET_LOST)
    it(Signal.TARGET_READY)
    opening, command = sent(it.propose(5))
    assert (opening.epoch, opening.token_ids) == (2, (1, 2, 3, 4))
    assert command.epoch == 2


def test_a_target_away_too_long_is_an_error_with_last_index() -> None:
    it = verifying(5, 6)
    it(Signal.TARGET_LOST)
    it.now = 99.9
    assert it(Signal.DEADLINE) == []
    it.now = 100.0
    *closing, fail = it(Signal.DEADLINE)
    assert isinstance(fail.error, UnavailableError)
    assert fail.error.last_index == 0
    assert closing == [ToDraft(CloseSequence("s", 1))]
    assert it.phase is Phase.DONE


def test_a_late_target_is_reported_to_the_dispatcher() -> None:
    it = verifying(5)
    it.now = 10.0
    assert it(Signal.DEADLINE) == [TargetHangs()]
    assert it.phase is Phase.VERIFYING


def test_a_late_but_alive_target_is_asked_again() -> None:
    it = verifying(5)
    it.now = 10.0
    assert it(Signal.TARGET_LATE) == [ToTarget(VerifyRound("s", 1, 2, 4, (), Proposal((5,))))]
    assert (it.phase, it.state.deadline) == (Phase.VERIFYING, 20.0)
    it.judge(5, 6)
    assert it.generated == [4, 5, 6]


def test_a_target_left_for_another_is_closed() -> None:
    it = verifying(5)
    it.now = 10.0
    assert it(Signal.TARGET_LEFT) == [ToTarget(CloseSequence("s", 1))]
    assert it.phase is Phase.STALLED
    assert sent(it(Signal.TARGET_READY))[1] == VerifyRound("s", 2, 2, 4, (), Proposal((5,)))


def test_a_round_losing_its_target_repeatedly_fails() -> None:
    """A request that kills its targets is not retried for ever."""
    it = verifying(5)
    for _ in range(MAX_LOSSES - 1):
        assert it(Signal.TARGET_LOST) == []
        it(Signal.TARGET_READY)
    it.judge(5, 6, epoch=MAX_LOSSES)
    it.propose(7)
    for _ in range(MAX_LOSSES - 1):
        assert it(Signal.TARGET_LOST) == [], "there was a verdict"
        assert it(Signal.TARGET_LOST) == [], "it had nothing to do"
        it(Signal.TARGET_READY)
    *closing, fail = it(Signal.TARGET_LOST)
    assert isinstance(fail.error, InternalError), "no client resumes with that"
    assert closing == [ToDraft(CloseSequence("s", 1))]


# ---- the target refuses ---------------------------------------------------------------------------


def test_a_preempted_sequence_repeats_its_round() -> None:
    """It stays open: reopened it would be the youngest."""
    it = verifying(5)
    error = ResourceExhaustedError("full")
    assert it.target_fails(error) == [WaitForBlocks(error, preempted=True)]
    assert (it.phase, it.state.deadline, it.state.holds_target) == (Phase.WAITING, None, False)
    (command,) = sent(it(Signal.BLOCKS_FREED))
    assert command == VerifyRound("s", 1, 2, 4, (), Proposal((5,)))
    assert (it.phase, it.state.holds_target) == (Phase.VERIFYING, True)
    # It had nothing since, so nothing was taken from it.
    assert it.target_fails(error) == [WaitForBlocks(error, preempted=False)]


def test_a_new_sequence_without_room_is_not_preempted() -> None:
    it = prefilling(draft=False)
    error = ResourceExhaustedError("full")
    assert it.target_fails(error) == [WaitForBlocks(error, preempted=False)]


def test_a_refused_opening_is_repeated() -> None:
    it = prefilling(draft=False)
    error = ResourceExhaustedError("as many sequences as it holds")
    assert it.target_fails(error, number=0) == [ToTarget(CloseSequence("s", 1)), WaitForBlocks(error)]
    opening, command = sent(it(Signal.BLOCKS_FREED))
    assert (opening.epoch, command.epoch) == (2, 2)


def test_a_paused_sequence_gives_its_blocks_away() -> None:
    it = verifying(5)
    assert it(Signal.BLOCKS_WANTED) == [], "it goes on by itself"
    it(Signal.CLIENT_BEHIND)
    it.judge(7)
    assert it.phase is Phase.PAUSED
    assert it(Signal.BLOCKS_WANTED) == [ToTarget(CloseSequence("s", 1)), ToDraft(CloseSequence("s", 1))]
    assert not it.state.holds_target
    assert it(Signal.BLOCKS_WANTED) == []
    opening = sent(it(Signal.CLIENT_CAUGHT_UP))[0]
    assert opening == OpenSequence("s", 2, tuple(it.state.ledger.token_ids), it.state.params)


def test_waiting_for_blocks_is_not_a_failed_attempt() -> None:
    it = verifying(5)
    for _ in range(2 * MAX_ATTEMPTS):
        it.target_fails(ResourceExhaustedError("full"))
        it(Signal.BLOCKS_FREED)
    it.target_fails(NotFoundError("gone"))
    assert it.phase is Phase.VERIFYING


def test_losing_the_target_while_waiting_for_blocks_stalls() -> None:
    it = verifying(5)
    it.target_fails(ResourceExhaustedError("full"))
    it(Signal.TARGET_LOST)
    assert it.phase is Phase.STALLED
    assert it(Signal.BLOCKS_FREED) == []
    assert sent(it(Signal.TARGET_READY))[0].epoch == 2


@pytest.mark.parametrize("error", [NotFoundError("gone"), StaleEpochError("old")])
def test_a_target_without_the_sequence_is_reopened(error: PacelineError) -> None:
    it = verifying(5)
    opening, command = sent(it.target_fails(error))
    assert opening == OpenSequence("s", 2, (1, 2, 3, 4), it.state.params)
    assert command == VerifyRound("s", 2, 2, 4, (), Proposal((5,)))
    assert it.target_fails(error, epoch=1) == []


def test_a_target_lacking_tokens_gets_the_tail() -> None:
    it = verifying(5)
    assert sent(it.target_fails(FailedPreconditionError("gap", known_length=1))) == [
        VerifyRound("s", 1, 2, 4, (2, 3, 4), Proposal((5,)))
    ]
    far = FailedPreconditionError("nonsense", known_length=99)
    assert sent(it.target_fails(far)) == [VerifyRound("s", 1, 2, 4, (), Proposal((5,)))]


@pytest.mark.parametrize(
    "error", [InvalidArgumentError("proposal.distributions", "bad"), InternalError("nan after token 5")]
)
def test_a_proposal_failing_on_the_target_is_dropped(error: PacelineError) -> None:
    it = verifying(5)
    opening, again = sent(it.target_fails(error))
    assert opening == OpenSequence("s", 2, (1, 2, 3, 4), it.state.params)
    assert again == VerifyRound("s", 2, 2, 4, (), Proposal())
    *_, fail = it.target_fails(error, epoch=2)
    assert fail == Fail(error), "without a proposal it is the request that is wrong"


@pytest.mark.parametrize("mode", [AcceptanceMode.REJECTION, AcceptanceMode.BLOCK])
def test_in_ratio_modes_a_broken_model_ends_the_request(mode: AcceptanceMode) -> None:
    """Repeating without the proposal would make breaking tokens rarer than in plain decoding."""
    it = verifying(5)
    it.state.params = replace(it.state.params, mode=mode)
    error_of(it.target_fails(InternalError("nan after token 5")))


def test_a_target_that_keeps_refusing_ends_the_request() -> None:
    it = verifying(5)
    for epoch in range(1, MAX_ATTEMPTS):
        assert it.target_fails(NotFoundError("gone"), epoch=epoch)
        assert it.phase is Phase.VERIFYING
    error_of(it.target_fails(NotFoundError("gone"), epoch=MAX_ATTEMPTS))
    assert it.phase is Phase.DONE


def test_a_broken_model_ends_the_request_and_frees_both_caches() -> None:
    it = verifying(5)
    error = InternalError("nan")
    it.target_fails(error)
    assert it.target_fails(error, epoch=2) == [
        ToTarget(CloseSequence("s", 2)),
        ToDraft(CloseSequence("s", 1)),
        Fail(error),
    ]


def test_a_shorter_target_is_not_asked_beyond_its_length() -> None:
    """Its refusal would name a field that the client never sent."""
    it = verifying(5)
    it(Signal.TARGET_LOST)
    it.state.planner.target_max_len = it.length + 1
    assert sent(it(Signal.TARGET_READY))[-1] == VerifyRound("s", 2, 2, 4, (), Proposal((5,)))
    it = verifying(5)
    it(Signal.TARGET_LOST)
    it.state.planner.target_max_len = it.length
    error = error_of(it(Signal.TARGET_READY))
    assert isinstance(error, UnavailableError)
    assert f"serves {it.length} tokens" in error.message


@pytest.mark.parametrize("round_number", [1, 3])
def test_a_stale_target_failure_is_ignored(round_number: int) -> None:
    it = verifying(5)
    assert it.target_fails(InternalError("late"), number=round_number) == []
    assert it.phase is Phase.VERIFYING


@pytest.mark.parametrize(
    ("verdict", "computed"),
    [
        ((6, 7), None),  # accepted what was not proposed
        ((5, 6, 7), None),  # accepted more than was proposed
        ((5, VOCAB), None),
        ((5, 6), 4),  # the cache is not the ledger without its last token
        ((5, 6), 6),
    ],
)
def test_a_verdict_unlike_its_round_ends_the_request(verdict: tuple[int, ...], computed: int | None) -> None:
    it = verifying(5)
    assert isinstance(error_of(it.judge(*verdict, computed=computed)), InternalError)
    assert it.generated == [4]


# ---- the client ----------------------------------------------------------------------------------


def test_a_slow_client_pauses_the_sequence_between_rounds() -> None:
    it = verifying(5)
    assert it(Signal.CLIENT_BEHIND) == []
    assert it.phase is Phase.VERIFYING
    (emit,) = it.judge(5, 6)
    assert isinstance(emit, Emit)
    assert (it.phase, it.state.deadline) == (Phase.PAUSED, None)
    assert sent(it(Signal.CLIENT_CAUGHT_UP)) == [DraftRound("s", 1, 3, 6, (5, 6), 3)]
    assert it(Signal.CLIENT_CAUGHT_UP) == []


def test_a_client_catching_up_before_the_verdict_pauses_nothing() -> None:
    it = verifying(5)
    it(Signal.CLIENT_BEHIND)
    it(Signal.CLIENT_CAUGHT_UP)
    it.judge(5, 6)
    assert it.phase is Phase.DRAFTING


def test_workers_may_come_and_go_during_a_pause() -> None:
    it = verifying(5)
    it(Signal.CLIENT_BEHIND)
    it.judge(5, 6)
    for signal in (Signal.TARGET_LOST, DraftLost(), Signal.TARGET_READY):
        assert it(signal) == []
    opening, command = sent(it(Signal.CLIENT_CAUGHT_UP))
    assert (opening.epoch, opening.token_ids) == (2, (1, 2, 3, 4, 5, 6))
    assert command.proposal == Proposal()


@pytest.mark.parametrize("build", [drafting, lambda: verifying(5)])
def test_a_client_that_leaves_frees_both_caches(build: Any) -> None:
    it = build()
    assert it(Signal.CANCEL) == [ToTarget(CloseSequence("s", 1)), ToDraft(CloseSequence("s", 1))]
    assert it.phase is Phase.DONE


def test_leaving_before_any_opening_closes_nothing() -> None:
    assert Driver()(Signal.CANCEL) == []
    it = verifying(5)
    it(Signal.TARGET_LOST)
    it(DraftLost())
    assert it(Signal.CANCEL) == []


def test_length_ends_a_sequence_in_the_round_that_reaches_it() -> None:
    it = verifying(5, 6, k=3, max_tokens=4)
    emit, *_ = it.judge(5, 6, 7)
    assert emit.commit.finish.reason is FinishReason.LENGTH
    assert it.generated == [4, 5, 6, 7]
