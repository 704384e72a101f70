"""Plain rounds and copies that a target begins by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from coordinator.proposers.interface import ContextSource, Guess
from coordinator.sequence.messages import Action, DraftReady, Emit, Phase, Signal, ToDraft, ToTarget
from paceline.core.errors import FailedPreconditionError, InternalError, ResourceExhaustedError
from paceline.core.messages import (
    CloseSequence,
    Continuations,
    DraftRound,
    RoundVerdict,
    VerifyAhead,
    VerifyRound,
)
from paceline.core.types import Outcome, Proposal, Verdict
from tests.unit.coordinator.test_round import PROMPT, Driver, error_of
from tests.unit.coordinator.test_round_policy import Scripted, copying

N = len(PROMPT)


def commands(actions: list[Action]) -> list[Any]:
    return [a.command for a in actions if isinstance(a, ToTarget | ToDraft)]


def told(number: int, base: int, epoch: int = 1) -> VerifyAhead:
    """What a target is told of the round after this one."""
    return VerifyAhead("s", epoch, number, base, {}, plain_otherwise=True)


def goes_on(it: Driver, *token_ids: int, number: int | None = None, count: int = 0) -> list[Action]:
    """The verdict of a target that has begun a round, with so many draft tokens."""
    verdict = Verdict(len(token_ids) - 1, token_ids, it.length + len(token_ids) - 1, went_on_with=count)
    return it(RoundVerdict("s", 1, it.state.round if number is None else number, verdict))


def plain(**options: Any) -> Driver:
    """In round 2, with nobody to draft."""
    it = Driver(**options)
    it(Signal.TARGET_READY)
    it.judge(4)
    return it


def chosen(*ks: int, **options: Any) -> tuple[Driver, Scripted]:
    """In round 2, with a draft and these wishes."""
    it, policy = Driver(k=5, **options), Scripted(list(ks))
    it.take_policy(policy)
    it(DraftReady())
    it(Signal.TARGET_READY)
    it.judge(4)
    return it, policy


def test_the_target_is_told_of_plain_next_rounds() -> None:
    it = Driver()
    assert [type(c) for c in commands(it(Signal.TARGET_READY))][1:] == [VerifyRound], "the first one prefills"
    assert commands(it.judge(4)) == [VerifyRound("s", 1, 2, N + 1, (), Proposal()), told(2, N + 1)]


def test_a_target_that_goes_on_is_not_asked() -> None:
    it = plain()
    for number, token in enumerate((5, 6, 7), start=2):
        actions = goes_on(it, token)
        assert isinstance(actions[0], Emit)
        assert commands(actions) == [told(number + 1, it.length)]
        assert (it.phase, it.state.round) == (Phase.VERIFYING, number + 1)
    assert it.generated == [4, 5, 6, 7]
    assert it.state.stats.num_lookahead_hits == 0
    assert it.state.deadline == it.now + 10.0


def test_a_target_told_too_late_is_asked() -> None:
    it = plain()
    assert commands(it.judge(5)) == [VerifyRound("s", 1, 3, N + 2, (), Proposal()), told(3, N + 2)]


def test_a_target_going_on_untold_fails_the_request() -> None:
    it, _ = chosen(2)
    it.propose(7, 8)
    assert isinstance(error_of(goes_on(it, 7, 5)), InternalError)


@pytest.mark.parametrize(
    "options", [{"max_tokens": 3}, {"target_max_len": N + 3}], ids=["asked", "the model"]
)
def test_no_round_begins_past_the_last_one(options: dict[str, int]) -> None:
    it = plain(**options)
    assert commands(goes_on(it, 5)) == []
    actions = it.judge(6)
    assert [type(c) for c in commands(actions)] == [CloseSequence]
    assert it.generated == [4, 5, 6]


def test_a_round_begun_past_an_unforeseen_end_is_closed() -> None:
    it = plain(stop_token_ids=(9,))
    assert [type(c) for c in commands(goes_on(it, 9))] == [CloseSequence]
    assert it.phase is Phase.DONE
    assert goes_on(it, 5, number=3) == []


def test_every_round_is_chosen_once_during_the_previous() -> None:
    it, policy = chosen(0, 0, 0, 0, 2)
    assert [c[0] for c in policy.told()] == ["on_verify", "choose", "on_verdict", "on_verify", "choose"]
    for _ in range(2):
        goes_on(it, 5)
        assert [c[0] for c in policy.told()] == ["on_verdict", "on_verify", "choose"]
    actions = goes_on(it, 5)
    assert commands(actions) == [], "the next round is drafted for"
    (asked,) = [c for c in commands(it.judge(6)) if isinstance(c, DraftRound)]
    assert asked.num_draft_tokens == 2
    assert [c[0] for c in policy.told()] == [
        "on_verdict",
        "on_verify",
        "choose",
        "on_verdict",
        "on_draft_request",
    ]


def test_a_slow_client_gets_the_begun_round_then_pauses() -> None:
    it = plain()
    it(Signal.CLIENT_BEHIND)
    assert commands(goes_on(it, 5)) == []
    it.judge(6)
    assert it.phase is Phase.PAUSED
    first, second = commands(it(Signal.CLIENT_CAUGHT_UP))
    assert (first.round, second) == (4, told(4, N + 3))


def test_a_round_begun_ahead_survives_losing_the_target() -> None:
    it = plain()
    goes_on(it, 5)
    it(Signal.TARGET_LOST)
    opening, again, ahead = commands(it(Signal.TARGET_READY))
    assert opening.token_ids == (*PROMPT, 4, 5)
    assert again == VerifyRound("s", 2, 3, N + 2, (), Proposal())
    assert ahead == told(3, N + 2, epoch=2)


def test_a_round_begun_ahead_may_wait_for_blocks() -> None:
    it = plain()
    goes_on(it, 5)
    it.target_fails(ResourceExhaustedError("full"), number=3)
    assert it.phase is Phase.WAITING
    assert commands(it(Signal.BLOCKS_FREED)) == [
        VerifyRound("s", 1, 3, N + 2, (), Proposal()),
        told(3, N + 2),
    ]


def test_a_plain_round_begun_by_the_target_ends_drafting() -> None:
    it, _ = chosen(2, 0, 0)
    it.propose(7, 8)
    foreseen = Continuations("s", 1, 2, it.length, {Outcome(1, 5): Proposal((6, 6))})
    assert commands(it(foreseen)) == [told(2, it.length)]
    assert commands(it(foreseen)) == [], "once"
    assert commands(goes_on(it, 7, 8, 5)) == [told(3, it.length)]
    assert it.generated == [4, 7, 8, 5]


def copying_plainly(*copies: int) -> tuple[Driver, Scripted]:
    """In round 3, with nobody to draft and the text 1 2 3 1 2: 3 1 2 may follow, again and again."""
    it, policy = copying(*copies)
    it(Signal.TARGET_READY)
    it.judge(1)
    policy.told()
    return it, policy


def copies_told(number: int, base: int, outcome: tuple[int, int], *token_ids: int) -> VerifyAhead:
    return VerifyAhead("s", 1, number, base, {Outcome(*outcome): Proposal(token_ids)}, plain_otherwise=True)


def goes_on_with(it: Driver, count: int, *token_ids: int) -> list[Any]:
    return commands(goes_on(it, *token_ids, count=count))


def test_the_target_copies_by_itself_in_repeating_text() -> None:
    it, policy = copying_plainly(3, 2, 0)
    (ahead,) = goes_on_with(it, 0, 2)
    assert ahead == copies_told(3, N + 2, (0, 3), 1, 2, 3)
    (ahead,) = goes_on_with(it, 3, 3)
    # 1 2 3 is being judged: should all of it come true and 1 follow, 2 3 comes after that.
    assert ahead == copies_told(4, N + 3, (3, 1), 2, 3)
    assert it.state.committed.source == ""
    assert goes_on_with(it, 2, 1, 2, 3, 1) == [told(5, N + 7)]
    assert it.state.committed.source
    assert it.generated == [1, 2, 3, 1, 2, 3, 1]
    assert [c for c in policy.told() if c[0] == "choose_guess"] == [
        ("choose_guess", 3, 5, 0),
        ("choose_guess", 7, 5, 0),
        ("choose_guess", 10, 5, 0),
    ]
    stats = it.state.stats
    assert (stats.num_prompt_lookups, stats.num_lookahead_hits) == (1, 0)
    assert it.state.present.record.source


def test_a_source_is_asked_once_for_its_next_guess() -> None:
    it, _ = copying_plainly(3, 2, 0)
    (lookup,) = it.state.planner.sources
    asked: list[int] = []

    class Counting(ContextSource):
        name = lookup.name

        def guess(self, tokens: Sequence[int], most: int, after: Sequence[int] = ()) -> Guess | None:
            asked.append(len(after))
            return lookup.guess(tokens, most, after)

    it.state.planner.sources = [Counting()]
    goes_on_with(it, 0, 2)
    asked.clear()
    (ahead,) = goes_on_with(it, 3, 3)
    assert ahead == copies_told(4, N + 3, (3, 1), 2, 3)
    assert asked == [3]


def test_a_copy_offered_too_late_is_sent_to_the_target() -> None:
    it, policy = copying_plainly(3, 0)
    goes_on_with(it, 0, 2)
    verify, ahead = commands(it.judge(3))
    assert verify == VerifyRound("s", 1, 4, N + 3, (), Proposal((1, 2, 3)))
    assert ahead == told(4, N + 3)
    assert policy.told()[-2:] == [("on_verify", 3, False), ("choose_guess", 7, 5, 0)]
    assert it.state.present.record.source


def test_a_text_that_stops_repeating_is_decoded_plainly() -> None:
    it, _ = copying_plainly(3, 0)
    goes_on_with(it, 0, 2)
    assert goes_on_with(it, 0, 9) == [told(4, N + 3)]
    assert not it.state.present.record.source


def test_a_plain_round_may_follow_a_partly_accepted_copy() -> None:
    it, _ = copying_plainly(3, 0, 0)
    goes_on_with(it, 0, 2)
    goes_on_with(it, 3, 3)
    assert goes_on_with(it, 0, 1, 9) == [told(5, N + 5)]
    assert it.generated == [1, 2, 3, 1, 9]


def test_a_repeated_offer_is_unchanged() -> None:
    """The target may have begun with it."""
    it, _ = copying_plainly(3, 2)
    (ahead,) = goes_on_with(it, 0, 2)
    it.target_fails(FailedPreconditionError("gap", known_length=N), number=3)
    verify, again = commands(it.target_fails(FailedPreconditionError("gap", known_length=N), number=3))
    assert (verify.round, again) == (3, ahead)


def test_copies_are_cut_to_the_remaining_tokens() -> None:
    it, _ = copying(5)
    it.state.ledger._max_tokens = 4
    it(Signal.TARGET_READY)
    it.judge(1)
    (ahead,) = goes_on_with(it, 0, 2)
    assert ahead == told(3, N + 2), "a plain token comes, and one more"
