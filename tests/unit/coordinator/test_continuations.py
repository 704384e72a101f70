"""Continuations in the round machine: used when the verdict is the foreseen one, otherwise without effect."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.sequence.messages import DraftLost, Emit, FromDraft, Phase, Signal, ToDraft, ToTarget
from paceline.core.errors import InternalError, NotFoundError
from paceline.core.messages import (
    CloseSequence,
    Continuations,
    DraftProposal,
    DraftRound,
    RoundVerdict,
    SequenceFailed,
    VerifyAhead,
    VerifyRound,
)
from paceline.core.types import Outcome, Proposal, SparseDistribution, Verdict
from tests.unit.coordinator.test_round import Driver, error_of, sent, verifying

AFTER_7_5 = Outcome(1, 5)
"""One of the proposed tokens is accepted, and 5 follows."""


def foresee(it: Driver, outcomes: dict[tuple[int, int], Proposal], **changes: Any) -> list[Any]:
    """Give the machine continuations; what it hands to the target."""
    address = {"epoch": 1, "round": it.state.round, **changes}
    return sent(it(Continuations("s", base_length=it.length, proposals=outcomes, **address)))


def foreseen(*token_ids: int, **options: Any) -> Driver:
    """7 8 9 is being verified, and these are known to come next should 7 5 be its verdict."""
    it = verifying(7, 8, 9, **options)
    foresee(it, {AFTER_7_5: Proposal(token_ids)})
    return it


def judged(it: Driver, *token_ids: int, went_on_with: int | None = None) -> list[Any]:
    """The verdict of a target that goes on by itself."""
    verdict = Verdict(
        len(token_ids) - 1, token_ids, it.length + len(token_ids) - 1, went_on_with=went_on_with
    )
    return it(RoundVerdict("s", 1, it.state.round, verdict))


def test_continuations_are_passed_to_the_target() -> None:
    it = verifying(7, 8, 9)
    (command,) = foresee(it, {AFTER_7_5: Proposal((6, 6, 6)), Outcome(3, 5): Proposal((4, 4))})
    assert command == VerifyAhead(
        "s", 1, 2, it.length, {AFTER_7_5: Proposal((6, 6, 6)), Outcome(3, 5): Proposal((4, 4))}
    )


def test_a_target_going_on_is_not_asked_and_the_draft_told() -> None:
    it = foreseen(6, 6, 6)
    actions = judged(it, 7, 5, went_on_with=3)
    assert isinstance(actions[0], Emit)
    (draft,) = sent(actions)
    assert draft == DraftRound("s", 1, 3, 6, (7, 5), 3, 3, proposal_known=True)
    assert it.phase is Phase.VERIFYING
    assert it.state.present.record.hit
    it.judge(6, 6, 2)
    assert it.state.stats.num_lookahead_hits == 1
    assert it.generated == [4, 7, 5, 6, 6, 2]
    assert it.state.stats.num_draft_tokens == 6


def test_a_target_may_begin_with_the_shorter_proposal() -> None:
    it = foreseen(6, 6)
    foresee(it, {AFTER_7_5: Proposal((6, 6, 6))})
    (draft,) = sent(judged(it, 7, 5, went_on_with=2))
    assert (draft.num_draft_tokens, draft.num_lookahead_tokens) == (2, 3)
    it.judge(6, 6, 2)
    assert it.generated == [4, 7, 5, 6, 6, 2]


def test_a_late_target_begins_with_the_first_offer() -> None:
    """Its verdict leaves before it reads either of the two."""
    it = foreseen(6, 6)
    foresee(it, {AFTER_7_5: Proposal((6, 6, 6))})
    verify, draft = sent(judged(it, 7, 5))
    assert verify.proposal == Proposal((6, 6))
    assert (draft.num_draft_tokens, draft.num_lookahead_tokens) == (2, 3)


@pytest.mark.parametrize("again", [(6, 6), (6,), (6, 9, 6), (9, 9, 9)])
def test_a_contradicting_continuation_is_not_passed_on(again: tuple[int, ...]) -> None:
    """The target may have begun with the first one: its verdict would not fit."""
    it = foreseen(6, 6)
    assert foresee(it, {AFTER_7_5: Proposal(again)}) == []
    judged(it, 7, 5, went_on_with=2)
    it.judge(6, 6, 2)
    assert it.generated == [4, 7, 5, 6, 6, 2]


def test_a_target_going_on_with_an_unknown_proposal_fails() -> None:
    it = foreseen(6, 6, 6)
    assert isinstance(error_of(judged(it, 7, 8, 5, went_on_with=1)), InternalError)


def test_a_round_begun_past_the_end_is_closed() -> None:
    it = verifying(7, 8, 9, max_tokens=5)
    (command,) = foresee(it, {AFTER_7_5: Proposal((6, 6, 6)), Outcome(3, 5): Proposal((4, 4))})
    assert command.proposals == {AFTER_7_5: Proposal((6,))}, "after the other one nothing may follow"
    judged(it, 7, 5, went_on_with=1)
    assert it.phase is Phase.VERIFYING
    actions = judged(it, 6, 1)
    assert [type(c) for c in sent(actions)] == [CloseSequence, CloseSequence]
    assert it.generated == [4, 7, 5, 6, 1]


def test_a_slow_client_gets_the_begun_round_then_pauses() -> None:
    it = foreseen(6, 6, 6)
    it(Signal.CLIENT_BEHIND)
    judged(it, 7, 5, went_on_with=3)
    assert it.phase is Phase.VERIFYING
    assert foresee(it, {Outcome(0, 1): Proposal((1,))}) == [], "no further round is begun ahead"
    judged(it, 1)
    assert it.phase is Phase.PAUSED


def test_a_late_begun_round_failing_twice_drops_its_proposal() -> None:
    """The target began the round by itself, failed, and began it again when asked. The second failure or
    verdict does not belong to the round without the proposal."""
    it = foreseen(6, 6, 6)
    judged(it, 7, 5)
    broken = InternalError("nan after token 6")
    opening, again = sent(it.target_fails(broken))
    assert (opening.epoch, again.epoch, again.proposal) == (2, 2, Proposal())
    assert it.target_fails(broken) == []
    assert judged(it, 6, 6, 6, 4) == []
    it.judge(9, epoch=2)
    assert it.generated == [4, 7, 5, 9]


def test_a_late_begun_round_runs_before_the_pause() -> None:
    it = foreseen(6, 6, 6)
    it(Signal.CLIENT_BEHIND)
    verify, _ = sent(judged(it, 7, 5))
    assert verify.proposal == Proposal((6, 6, 6))
    judged(it, 1)
    assert it.phase is Phase.PAUSED


def test_nothing_begins_ahead_while_the_client_is_behind() -> None:
    it = verifying(7, 8, 9)
    it(Signal.CLIENT_BEHIND)
    assert foresee(it, {AFTER_7_5: Proposal((6, 6, 6))}) == []
    it(Signal.CLIENT_CAUGHT_UP)
    (command,) = sent(judged(it, 7, 5))
    assert isinstance(command, DraftRound)


def test_a_round_begun_ahead_survives_losing_both_workers() -> None:
    it = foreseen(6, 6, 6)
    judged(it, 7, 5, went_on_with=3)
    it(DraftLost())
    it(Signal.TARGET_LOST)
    opening, verify = sent(it(Signal.TARGET_READY))
    assert opening.token_ids[-2:] == (7, 5)
    assert (verify.round, verify.base_length, verify.proposal) == (3, 6, Proposal((6, 6, 6)))


def test_a_hit_verifies_at_once_and_informs_the_draft() -> None:
    it = verifying(7, 8, 9)
    foresee(it, {AFTER_7_5: Proposal((6, 6, 6)), Outcome(3, 5): Proposal((4, 4, 4))})
    actions = it.judge(7, 5)
    assert isinstance(actions[0], Emit)
    verify, draft = sent(actions)
    assert isinstance(verify, VerifyRound)
    assert verify.proposal == Proposal((6, 6, 6))
    assert (verify.round, verify.base_length) == (3, 6)
    assert isinstance(draft, DraftRound)
    assert (draft.round, draft.base_length, draft.committed_tail, draft.num_draft_tokens) == (3, 6, (7, 5), 3)
    assert it.phase is Phase.VERIFYING
    assert it.state.present.record.hit


def test_the_drafts_own_answer_to_a_hit_is_ignored() -> None:
    it = foreseen(6, 6, 6)
    it.judge(7, 5)
    assert it(DraftProposal("s", 1, 3, 6, Proposal((6, 6, 6)), 8)) == []
    assert it.generated == [4, 7, 5]
    it.judge(6, 6, 2)
    assert it.generated == [4, 7, 5, 6, 6, 2]


@pytest.mark.parametrize("changes", [{"epoch": 0}, {"epoch": 2}, {"round": 1}, {"round": 3}])
def test_continuations_of_another_round_or_epoch_are_dropped(changes: dict[str, int]) -> None:
    it = verifying(7, 8, 9)
    foresee(it, {AFTER_7_5: Proposal((6, 6, 6))}, **changes)
    it.judge(7, 5)
    assert it.phase is Phase.DRAFTING
    assert not it.state.present.record.hit


def test_an_unforeseen_outcome_is_an_ordinary_round() -> None:
    it = foreseen(6, 6, 6)
    (command,) = sent(it.judge(7, 2))
    assert isinstance(command, DraftRound)


def test_late_continuations_are_dropped() -> None:
    it = verifying(7, 8, 9)
    it.judge(7, 5)
    foresee(it, {AFTER_7_5: Proposal((6, 6, 6))}, round=2)
    it.propose(1, 1, 1)
    (command,) = sent(it.judge(1, 5))
    assert isinstance(command, DraftRound), "nothing of the old round is left"


def test_a_hit_is_cut_to_the_remaining_tokens() -> None:
    it = verifying(7, 8, 9, max_tokens=6)
    foresee(it, {Outcome(2, 5): Proposal((6, 6, 6))})
    verify, draft = sent(it.judge(7, 8, 5))
    assert verify.proposal == Proposal((6,)), "two tokens may follow, the last one is the target's"
    assert draft.num_draft_tokens == 1


@pytest.mark.parametrize(
    "proposal",
    [
        Proposal((99, 1, 1)),
        Proposal((1, 1), parents=(-1, 0)),
        Proposal((1,), distributions=(SparseDistribution(b"\1\0\0\0", b"\0\0\x80\x3f"),)),
    ],
    ids=["outside the vocabulary", "a tree", "with distributions"],
)
def test_invalid_continuations_are_no_hit(proposal: Proposal) -> None:
    it = verifying(7, 8, 9)
    foresee(it, {AFTER_7_5: proposal})
    command = sent(it.judge(7, 5))[0]
    assert isinstance(command, DraftRound) or command.proposal.token_ids == proposal.token_ids[:2]
    if isinstance(command, VerifyRound):
        assert not command.proposal.parents


def test_an_offered_proposal_is_judged_after_losing_the_draft() -> None:
    it = foreseen(6, 6, 6)
    it(DraftLost())
    (command,) = sent(it.judge(7, 5))
    assert isinstance(command, VerifyRound)
    assert command.proposal == Proposal((6, 6, 6))
    (command,) = sent(it.judge(6, 1))
    assert (command.round, command.proposal) == (4, Proposal())


def test_a_draft_failing_after_a_hit_is_reopened_next_round() -> None:
    it = foreseen(6, 6, 6)
    it.judge(7, 5)
    assert it(FromDraft(SequenceFailed("s", 1, 3, NotFoundError("gone")))) == []
    actions = it.judge(6, 1)
    assert [type(a) for a in actions] == [Emit, ToDraft, ToDraft]
    assert not any(isinstance(a, ToTarget) for a in actions)
