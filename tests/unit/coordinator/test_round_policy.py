"""The round machine asks its policy once a round, and tells it what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from coordinator.events import Signal
from coordinator.member import Verification
from paceline.core.messages import Continuations, DraftProposal, DraftRound, RoundVerdict, VerifyAhead
from paceline.core.types import Proposal, Timings, Verdict
from tests.unit.coordinator.test_round import Driver, sent


@dataclass
class Scripted:
    """Says what it is told to, and writes down the rest."""

    ks: list[int]
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def choose(self, most: int, lacking: int, remaining: int) -> int:
        self.calls.append(("choose", most, lacking, remaining))
        return min(self.ks.pop(0), most)

    def proposed(self, num_draft: int, seconds: float, lacking: int) -> None:
        self.calls.append(("proposed", num_draft, seconds, lacking))

    def verifying(self, num_draft: int, *, prefills: bool) -> None:
        self.calls.append(("verifying", num_draft, prefills))

    def judged(self, num_draft: int, num_accepted: int, timing: Verification | None) -> None:
        self.calls.append(("judged", num_draft, num_accepted, timing))

    def leave(self) -> None:
        self.calls.append(("leave",))

    def told(self) -> list[tuple[Any, ...]]:
        """What was written down since the last time."""
        calls, self.calls = self.calls, []
        return calls


def begun(*ks: int) -> tuple[Driver, Scripted]:
    """After the first round, which prefills and has no draft tokens."""
    it, policy = Driver(k=5), Scripted(list(ks))
    it.machine._policy = policy
    it(Signal.DRAFT_READY)
    it(Signal.TARGET_READY)
    it.judge(4)
    return it, policy


def verdict(it: Driver, *token_ids: int) -> list[Any]:
    """With the pass that the target says it was."""
    timings = Timings(queue=0.0, compute=0.5, rows=9, sequences=2)
    judged = Verdict(len(token_ids) - 1, token_ids, it.length + len(token_ids) - 1, timings)
    return it(RoundVerdict("s", 1, it.machine.round, judged))


def test_the_first_round_prefills_and_is_neither_chosen_nor_timed() -> None:
    it, policy = begun(2)
    assert policy.told() == [
        ("verifying", 0, True),
        ("judged", 0, 0, None),
        ("choose", 5, it.length, it.machine.ledger.remaining),
    ]


def test_a_round_is_told_with_what_was_waited_for() -> None:
    it, policy = begun(2, 3)
    policy.told()
    lacked = it.length
    it.now += 0.25
    it.propose(7, 8)
    assert policy.told() == [("proposed", 2, 0.25, lacked), ("verifying", 2, False)]
    it.now += 2.0
    actions = verdict(it, 7, 5)
    assert policy.told() == [
        ("judged", 2, 1, Verification(2.0, 9, 2)),
        ("choose", 5, 2, it.machine.ledger.remaining),
    ]
    (command,) = sent(actions)
    assert isinstance(command, DraftRound)
    assert command.num_draft_tokens == 3


def test_what_was_foreseen_took_no_drafting_and_was_chosen_once() -> None:
    it, policy = begun(2, 3)
    it.propose(7, 8)
    policy.told()
    it(Continuations("s", 1, 2, it.length, {(1, 5): Proposal((6, 6, 6))}))
    assert [call[0] for call in policy.told()] == ["choose"]
    it(Continuations("s", 1, 2, it.length, {(2, 5): Proposal((6, 6, 6))}))
    verdict(it, 7, 5)
    assert [call for call in policy.told() if call[0] != "judged"] == [
        ("proposed", 3, 0.0, 0),
        ("verifying", 3, False),
    ]


def test_what_is_foreseen_is_cut_to_what_is_wanted() -> None:
    it, _ = begun(2, 1)
    it.propose(7, 8)
    (ahead,) = sent(it(Continuations("s", 1, 2, it.length, {(1, 5): Proposal((6, 6, 6))})))
    assert isinstance(ahead, VerifyAhead)
    assert ahead.proposals == {(1, 5): Proposal((6,))}


def test_where_plain_decoding_is_wanted_nothing_is_judged_ahead() -> None:
    it, policy = begun(2, 0)
    it.propose(7, 8)
    assert it(Continuations("s", 1, 2, it.length, {(1, 5): Proposal((6, 6, 6))})) == []
    (command,) = sent(verdict(it, 7, 5))
    assert command.proposal == Proposal()
    assert policy.told()[-1] == ("verifying", 0, False)


def test_a_proposal_longer_than_wanted_is_not_believed() -> None:
    it, policy = begun(2)
    policy.told()
    it(DraftProposal("s", 1, 2, it.length, Proposal((7, 8, 9)), it.length + 2))
    assert [call[0] for call in policy.told()] == ["verifying"]


def test_a_draft_that_is_gone_is_not_asked_for() -> None:
    it, policy = begun(2)
    it(Signal.DRAFT_LOST)
    policy.told()
    verdict(it, 5)
    assert [call[0] for call in policy.told()] == ["judged", "verifying"]


def test_a_target_that_must_prefill_again_is_not_timed() -> None:
    it, policy = begun(0)
    it(Signal.TARGET_LOST)
    policy.told()
    it(Signal.TARGET_READY)
    assert policy.told() == [("verifying", 0, True)]


def test_the_end_is_told_once() -> None:
    it, policy = begun(2)
    policy.told()
    it(Signal.CANCEL)
    it(Signal.CANCEL)
    assert policy.told() == [("leave",)]
