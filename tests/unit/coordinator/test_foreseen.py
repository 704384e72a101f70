"""Continuations in the round machine: used when the verdict is the one they foresee, else of no effect."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.events import Emit, FromDraft, Phase, Signal, ToDraft, ToTarget
from paceline.core.errors import NotFoundError
from paceline.core.messages import (
    Continuations,
    DraftProposal,
    DraftRound,
    SequenceFailed,
    VerifyRound,
)
from paceline.core.types import Proposal, SparseDistribution
from tests.unit.coordinator.test_round import Driver, sent, verifying


def foresee(it: Driver, outcomes: dict[tuple[int, int], Proposal], **changes: Any) -> None:
    address = {"epoch": 1, "round": it.machine.round, **changes}
    event = Continuations("s", base_length=it.length, proposals=outcomes, **address)
    assert it(event) == []


def test_a_hit_starts_the_next_verification_at_once_and_tells_the_draft() -> None:
    it = verifying(7, 8, 9)
    foresee(it, {(1, 5): Proposal((6, 6, 6)), (3, 5): Proposal((4, 4, 4))})
    actions = it.judge(7, 5)
    assert isinstance(actions[0], Emit)
    verify, draft = sent(actions)
    assert isinstance(verify, VerifyRound)
    assert verify.proposal == Proposal((6, 6, 6))
    assert (verify.round, verify.base_length) == (3, 6)
    assert isinstance(draft, DraftRound)
    assert (draft.round, draft.base_length, draft.committed_tail, draft.num_draft_tokens) == (3, 6, (7, 5), 3)
    assert it.phase is Phase.VERIFYING
    assert it.machine.stats.num_lookahead_hits == 1


def test_the_drafts_own_answer_to_a_hit_changes_nothing() -> None:
    it = verifying(7, 8, 9)
    foresee(it, {(1, 5): Proposal((6, 6, 6))})
    it.judge(7, 5)
    assert it(DraftProposal("s", 1, 3, 6, Proposal((6, 6, 6)), 8)) == []
    assert it.generated == [4, 7, 5]
    it.judge(6, 6, 2)
    assert it.generated == [4, 7, 5, 6, 6, 2]


@pytest.mark.parametrize("changes", [{"epoch": 0}, {"epoch": 2}, {"round": 1}, {"round": 3}])
def test_continuations_of_another_round_or_epoch_are_dropped(changes: dict[str, int]) -> None:
    it = verifying(7, 8, 9)
    foresee(it, {(1, 5): Proposal((6, 6, 6))}, **changes)
    it.judge(7, 5)
    assert it.phase is Phase.DRAFTING
    assert it.machine.stats.num_lookahead_hits == 0


def test_another_outcome_is_an_ordinary_round() -> None:
    it = verifying(7, 8, 9)
    foresee(it, {(1, 5): Proposal((6, 6, 6))})
    (command,) = sent(it.judge(7, 2))
    assert isinstance(command, DraftRound)


def test_continuations_that_come_after_the_verdict_are_dropped() -> None:
    it = verifying(7, 8, 9)
    it.judge(7, 5)
    foresee(it, {(1, 5): Proposal((6, 6, 6))}, round=2)
    it.propose(1, 1, 1)
    (command,) = sent(it.judge(1, 5))
    assert isinstance(command, DraftRound), "nothing of the old round is left"


def test_a_hit_is_cut_to_what_may_still_be_committed() -> None:
    it = verifying(7, 8, 9, max_tokens=6)
    foresee(it, {(2, 5): Proposal((6, 6, 6))})
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
def test_nonsense_is_no_hit(proposal: Proposal) -> None:
    it = verifying(7, 8, 9)
    foresee(it, {(1, 5): proposal})
    command = sent(it.judge(7, 5))[0]
    assert isinstance(command, DraftRound) or command.proposal.token_ids == proposal.token_ids[:2]
    if isinstance(command, VerifyRound):
        assert not command.proposal.parents


def test_a_lost_draft_cannot_be_hit() -> None:
    it = verifying(7, 8, 9)
    foresee(it, {(1, 5): Proposal((6, 6, 6))})
    it(Signal.DRAFT_LOST)
    (command,) = sent(it.judge(7, 5))
    assert isinstance(command, VerifyRound)
    assert command.proposal == Proposal()


def test_a_draft_that_lost_the_sequence_behind_a_hit_is_opened_again_in_the_next_round() -> None:
    it = verifying(7, 8, 9)
    foresee(it, {(1, 5): Proposal((6, 6, 6))})
    it.judge(7, 5)
    assert it(FromDraft(SequenceFailed("s", 1, 3, NotFoundError("gone")))) == []
    actions = it.judge(6, 1)
    assert [type(a) for a in actions] == [Emit, ToDraft, ToDraft]
    assert not any(isinstance(a, ToTarget) for a in actions)
