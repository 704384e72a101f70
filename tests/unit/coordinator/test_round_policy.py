"""The round machine asks its policy once a round and reports the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from coordinator.proposers.interface import Guess
from coordinator.sequence.messages import DraftLost, DraftReady, Signal
from coordinator.speculation.policy import Verification
from paceline.core.errors import InvalidArgumentError, ResourceExhaustedError
from paceline.core.messages import (
    Continuations,
    DraftProposal,
    DraftRound,
    OpenSequence,
    RoundVerdict,
    VerifyAhead,
    VerifyRound,
)
from paceline.core.types import CHAIN, Outcome, Proposal, Timings, TreeShape, Verdict
from tests.unit.coordinator.test_round import Driver, sent


@dataclass
class Scripted:
    """Says what it is told to, and writes down the rest."""

    ks: list[int]
    copies: list[int] = field(default_factory=list)
    tree: TreeShape = CHAIN
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    prefills: list[float] = field(default_factory=list)

    def choose(self, most: int, lacking: int, remaining: int) -> int:
        self.calls.append(("choose", most, lacking, remaining))
        return min(self.ks.pop(0), most)

    def shape(self, k: int) -> TreeShape:
        return self.tree

    def on_proposal(self, proposal: Proposal, seconds: float, lacking: int, prefill: float = 0.0) -> None:
        self.calls.append(("on_proposal", proposal.num_draft_tokens, seconds, lacking))
        self.prefills.append(prefill)

    def on_draft_request(self, lacking: int) -> None:
        self.calls.append(("on_draft_request", lacking))

    def choose_guess(self, guesses: Sequence[Guess], most: int, num_draft: int) -> Guess | None:
        self.calls.append(("choose_guess", guesses[0].context_length, most, num_draft))
        length = min(self.copies.pop(0), most) if self.copies else 0
        return guesses[0].cut(length) if length else None

    def on_verify(self, proposal: Proposal, *, prefills: bool) -> None:
        self.calls.append(("on_verify", proposal.num_draft_tokens, prefills))

    def on_verdict(
        self, proposal: Proposal, verdict: Verdict, timing: Verification | None, guess: Guess | None = None
    ) -> None:
        context = [] if guess is None else [guess.context_length]
        counts = proposal.num_draft_tokens, verdict.num_accepted
        self.calls.append(("on_verdict", *counts, timing, *context))

    def on_suspend(self) -> None:
        self.calls.append(("on_suspend",))

    def told(self) -> list[tuple[Any, ...]]:
        """What was written down since the last time."""
        calls, self.calls = self.calls, []
        return calls


def begun(*ks: int) -> tuple[Driver, Scripted]:
    """After the first round, which prefills and has no draft tokens."""
    it, policy = Driver(k=5), Scripted(list(ks))
    it.take_policy(policy)
    it(DraftReady())
    it(Signal.TARGET_READY)
    it.judge(4)
    return it, policy


def verdict(it: Driver, *token_ids: int) -> list[Any]:
    """With the pass that the target says it was."""
    timings = Timings(queue=0.0, compute=0.5, rows=9, sequences=2)
    judged = Verdict(len(token_ids) - 1, token_ids, it.length + len(token_ids) - 1, timings)
    return it(RoundVerdict("s", 1, it.state.round, judged))


def test_the_first_round_is_neither_chosen_nor_timed() -> None:
    """The next round is chosen during it: the draft may read the prompt too."""
    it, policy = begun(2)
    remaining = it.state.ledger.remaining
    assert policy.told() == [
        ("on_verify", 0, True),
        ("choose", 5, it.length - 1, remaining + 1),
        ("on_verdict", 0, 0, None),
        ("on_draft_request", it.length),
    ]


def test_a_drafts_prefill_time_is_reported() -> None:
    it, policy = begun(2)
    policy.told()
    proposal = DraftProposal("s", 1, 2, 4, Proposal((5, 6)), 5, Timings(prefill=0.125))
    it(proposal)
    assert policy.prefills == [0.125]


@pytest.mark.parametrize("why", ["blocks", "target", "client"])
def test_a_waiting_sequence_leaves_the_policys_count(why: str) -> None:
    it, policy = begun(0, 0)
    policy.told()
    match why:
        case "blocks":
            it.target_fails(ResourceExhaustedError("full", 1.0))
        case "target":
            it(Signal.TARGET_LOST)
        case _:
            it(Signal.CLIENT_BEHIND)
            it.judge(5)
            it.judge(6)
    assert ("on_suspend",) in policy.told()


def test_a_round_is_reported_with_its_waiting_times() -> None:
    it, policy = begun(2, 3)
    policy.told()
    lacked = it.length
    it.now += 0.25
    it.propose(7, 8)
    assert policy.told() == [("on_proposal", 2, 0.25, lacked), ("on_verify", 2, False)]
    it.now += 2.0
    actions = verdict(it, 7, 5)
    assert policy.told() == [
        ("on_verdict", 2, 1, Verification(2.0)),
        ("choose", 5, 2, it.state.ledger.remaining),
        ("on_draft_request", 2),
    ]
    (command,) = sent(actions)
    assert isinstance(command, DraftRound)
    assert command.num_draft_tokens == 3


def test_a_hit_took_no_drafting_and_was_chosen_once() -> None:
    it, policy = begun(2, 3)
    it.propose(7, 8)
    policy.told()
    it(Continuations("s", 1, 2, it.length, {Outcome(1, 5): Proposal((6, 6, 6))}))
    assert [call[0] for call in policy.told()] == ["choose"]
    it(Continuations("s", 1, 2, it.length, {Outcome(2, 5): Proposal((6, 6, 6))}))
    verdict(it, 7, 5)
    assert [call for call in policy.told() if call[0] != "on_verdict"] == [
        ("on_proposal", 3, 0.0, 0),
        ("on_verify", 3, False),
    ]


def test_continuations_are_cut_to_the_chosen_k() -> None:
    it, _ = begun(2, 1)
    it.propose(7, 8)
    (ahead,) = sent(it(Continuations("s", 1, 2, it.length, {Outcome(1, 5): Proposal((6, 6, 6))})))
    assert isinstance(ahead, VerifyAhead)
    assert ahead.proposals == {Outcome(1, 5): Proposal((6,))}


def test_continuations_are_unused_when_plain_is_chosen() -> None:
    it, policy = begun(2, 0, 2)
    it.propose(7, 8)
    assert sent(it(Continuations("s", 1, 2, it.length, {Outcome(1, 5): Proposal((6, 6, 6))}))) == []
    (command,) = sent(verdict(it, 7, 5))
    assert command.proposal == Proposal()
    assert policy.told()[-2:] == [("on_verify", 0, False), ("choose", 5, 2, it.state.ledger.remaining)]


def test_a_too_long_proposal_is_not_measured() -> None:
    it, policy = begun(2)
    policy.told()
    it(DraftProposal("s", 1, 2, it.length, Proposal((7, 8, 9)), it.length + 2))
    assert [call[0] for call in policy.told()] == ["on_verify"]


def test_a_lost_draft_is_not_asked() -> None:
    it, policy = begun(2)
    it(DraftLost())
    policy.told()
    verdict(it, 5)
    assert [call[0] for call in policy.told()] == ["on_verdict", "on_verify"]


def test_a_repeated_prefill_is_not_timed() -> None:
    it, policy = begun(0, 0)
    it(Signal.TARGET_LOST)
    policy.told()
    it(Signal.TARGET_READY)
    assert policy.told() == [("on_verify", 0, True)]


def test_the_policy_is_told_of_the_end_once() -> None:
    it, policy = begun(2)
    policy.told()
    it(Signal.CANCEL)
    it(Signal.CANCEL)
    assert policy.told() == [("on_suspend",)]


def copying(*copies: int, ks: tuple[int, ...] = (2, 2, 2), **options: Any) -> tuple[Driver, Scripted]:
    """In round 2: the prompt and the first token end as the prompt began."""
    it, policy = Driver(k=5, **options), Scripted(list(ks), list(copies))
    it.take_sources()
    it.take_policy(policy)
    return it, policy


def repeating(it: Driver, policy: Scripted) -> list[Any]:
    """Two plain rounds bring the text to 1 2 3 1 2."""
    policy.ks[:0] = [0]
    it(DraftReady())
    it(Signal.TARGET_READY)
    it.judge(1)
    policy.told()
    return sent(it.judge(2))


def test_a_copy_is_sent_to_the_target_at_once() -> None:
    """The draft is not asked, and later gets all tokens it lacks."""
    it, policy = copying(3, 0)
    (command,) = repeating(it, policy)
    assert isinstance(command, VerifyRound)
    # The text is 1 2 3 1 2: then 3 1 2 came, and so on.
    assert command.proposal == Proposal((3, 1, 2))
    assert [c[0] for c in policy.calls] == ["on_verdict", "choose_guess", "on_verify", "choose"]
    assert policy.told()[1:3] == [("choose_guess", 2, 5, 2), ("on_verify", 3, False)]
    actions = verdict(it, 3, 1, 4)
    assert it.generated == [1, 2, 3, 1, 4]
    told = policy.told()
    assert told[0] == ("on_verdict", 3, 2, Verification(0.0), 2)
    assert it.state.stats.num_prompt_lookups == 1
    assert it.state.stats.num_draft_tokens == 3
    opening, asked = sent(actions)
    assert isinstance(opening, OpenSequence)
    assert isinstance(asked, DraftRound)
    assert opening.token_ids == (1, 2, 3, 1, 2, 3, 1, 4)


def test_a_copy_is_cut_to_the_remaining_tokens() -> None:
    it, policy = copying(5, max_tokens=4)
    (command,) = repeating(it, policy)
    assert command.proposal == Proposal((3,))
    assert ("choose_guess", 2, 1, 1) in policy.told()


def test_copying_needs_no_draft_worker() -> None:
    it, policy = copying(3)
    it(Signal.TARGET_READY)
    it.judge(1)
    # The target was told that a plain round is next when the text did not repeat itself yet.
    (command,) = sent(it.judge(2))
    assert command.proposal == Proposal()
    (command,) = sent(it.judge(3))
    assert command.proposal == Proposal((1, 2, 3))
    # The second one is of what follows that copy.
    copies = [call for call in policy.told() if call[0] in ("choose", "choose_guess")]
    assert copies == [("choose_guess", 3, 5, 0), ("choose_guess", 7, 5, 0)]


def test_a_copy_not_worthwhile_is_drafted() -> None:
    it, policy = copying(0)
    commands = repeating(it, policy)
    assert isinstance(commands[-1], DraftRound)
    assert not it.state.present.record.source


def test_without_prompt_lookup_nothing_is_looked_up() -> None:
    it, policy = copying(3)
    it.state.planner.sources = ()
    assert isinstance(repeating(it, policy)[-1], DraftRound)
    assert all(call[0] != "choose_guess" for call in policy.told())


def test_a_request_with_k_zero_copies_nothing() -> None:
    it, policy = copying(3)
    it.state.planner.num_speculative_tokens = 0
    it(Signal.TARGET_READY)
    it.judge(1)
    (command,) = sent(it.judge(2))
    assert command.proposal == Proposal()
    assert all(call[0] != "choose_guess" for call in policy.told())


def test_a_hit_takes_precedence_over_a_copy() -> None:
    """The proposal is ready, and the target may have begun with it."""
    it, policy = copying(3, ks=(0, 2, 2))
    it(DraftReady())
    it(Signal.TARGET_READY)
    it.judge(1)
    policy.copies.clear()
    policy.ks[:] = [2, 2]
    it.take_policy(policy)
    it.state.planner.sources = ()
    it.judge(9)  # text: 1 2 3 1 9
    it.propose(1, 2)
    it.take_sources()
    policy.copies[:] = [3]
    it(Continuations("s", 1, it.state.round, it.length, {Outcome(2, 3): Proposal((7, 7))}))
    commands = sent(verdict(it, 1, 2, 3))
    assert commands[0].proposal == Proposal((7, 7))
    assert not it.state.present.record.source


def test_a_refused_copy_is_dropped() -> None:
    it, policy = copying(3)
    (command,) = repeating(it, policy)
    assert command.proposal.num_draft_tokens == 3
    _, again = sent(it.target_fails(InvalidArgumentError("proposal", "is wrong")))
    assert again.proposal == Proposal()
