"""A draft whose proposals the target refuses pauses ever longer; rounds go on without it."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.proposers.remote_draft import MAX_PAUSE_ROUNDS
from coordinator.sequence.messages import DraftLost, DraftReady, Phase
from paceline.core.errors import InternalError, InvalidArgumentError, PacelineError
from paceline.core.messages import Continuations, OpenSequence, VerifyAhead, VerifyRound
from paceline.core.types import Outcome, Proposal
from tests.unit.coordinator.test_round import Driver, drafting, sent
from tests.unit.coordinator.test_round_policy import copying, repeating

REFUSAL = InvalidArgumentError("proposal", "is wrong")
LONG = {"max_tokens": 900, "target_max_len": 1000, "draft_max_len": 1000}


def epoch(it: Driver) -> int:
    return it.state.target.epoch


def refuse(it: Driver, error: PacelineError = REFUSAL) -> list[Any]:
    """The target refuses the round in progress, which is then put without a proposal."""
    commands = sent(it.target_fails(error, epoch(it)))
    assert [type(command) for command in commands] == [OpenSequence, VerifyRound]
    assert commands[1].proposal == Proposal()
    return commands


def plain_rounds(it: Driver) -> int:
    """Rounds without a draft, up to the next one that asks it."""
    count = 0
    while it.phase is Phase.VERIFYING:
        it.judge(5, epoch=epoch(it))
        count += it.phase is Phase.VERIFYING
    return count


def put(it: Driver, *token_ids: int) -> None:
    """The draft proposes these, and the target has them to judge."""
    it.propose(*token_ids, epoch=it.state.drafts[0].epoch)
    assert it.state.present.proposal == Proposal(token_ids)


@pytest.mark.parametrize("error", [REFUSAL, InternalError("the pass failed")], ids=["refused", "broken"])
def test_a_refused_draft_pauses_ever_longer(error: PacelineError) -> None:
    """Every refusal has the target read the whole ledger again."""
    it = drafting(k=4, **LONG)
    pauses = []
    for _ in range(8):
        put(it, 6, 7, 8, 9)
        refuse(it, error)
        pauses.append(plain_rounds(it))
    assert pauses == [1, 2, 4, 8, 16, 32, MAX_PAUSE_ROUNDS, MAX_PAUSE_ROUNDS]


def test_a_hundred_refused_rounds_open_seven_times() -> None:
    it = drafting(k=4, **LONG)
    opened = 0
    while it.state.round < 100:
        if it.phase is Phase.DRAFTING:
            put(it, 6, 7, 8, 9)
            opened += sum(isinstance(command, OpenSequence) for command in refuse(it))
        it.judge(5, epoch=epoch(it))
    assert opened == 7


def test_a_verdict_on_a_proposal_resets_the_pauses() -> None:
    it = drafting(k=4, **LONG)
    for pause in (1, 2, 4):
        put(it, 6, 7)
        refuse(it)
        assert plain_rounds(it) == pause
    put(it, 6, 7)
    it.judge(5, epoch=epoch(it))
    assert it.phase is Phase.DRAFTING
    put(it, 6, 7)
    refuse(it)
    assert plain_rounds(it) == 1


def test_a_refused_drafts_continuations_are_not_used() -> None:
    """They would be refused too, or belong to another proposal."""
    it = drafting(k=4, **LONG)
    put(it, 6, 7)
    foreseen = Continuations("s", 1, 2, it.length, {Outcome(0, 5): Proposal((8, 9))})
    (told,) = sent(it(foreseen))
    assert isinstance(told, VerifyAhead)
    refuse(it)
    assert it(Continuations("s", 1, 2, it.length, {Outcome(0, 5): Proposal((8, 9, 10))})) == []
    it.judge(5, epoch=epoch(it))
    assert (it.phase, it.state.present.proposal) == (Phase.VERIFYING, Proposal())


def test_a_refused_hit_is_not_counted() -> None:
    it = drafting(k=4, **LONG)
    put(it, 6, 7)
    it(Continuations("s", 1, 2, it.length, {Outcome(0, 5): Proposal((8, 9))}))
    it.judge(5)
    assert it.state.present.record.hit
    refuse(it)
    it.judge(5, epoch=epoch(it))
    stats = it.state.stats
    assert (stats.num_rounds, stats.num_spec_steps, stats.num_lookahead_hits) == (3, 1, 0)
    assert not it.state.committed.hit


def test_a_refused_copy_is_not_counted() -> None:
    it, policy = copying(3, 0, **LONG)
    repeating(it, policy)
    assert it.state.present.record.source
    refuse(it)
    it.judge(5, epoch=epoch(it))
    stats = it.state.stats
    assert (stats.num_rounds, stats.num_spec_steps, stats.num_prompt_lookups) == (3, 0, 0)
    assert not it.state.committed.source
    last = [call for call in policy.told() if call[0] == "on_verdict"][-1]
    assert last[:3] == ("on_verdict", 0, 0)
    assert len(last) == 4, "a plain round has no match"


def test_a_returning_draft_is_asked_at_once() -> None:
    it = drafting(k=4, **LONG)
    for _ in range(3):
        put(it, 6, 7)
        refuse(it)
        plain_rounds(it)
    it(DraftLost())
    it(DraftReady())
    plain_rounds(it)
    put(it, 6, 7)
    refuse(it)
    assert plain_rounds(it) == 1
