"""Log-probabilities in the round machine: checked against the round, committed with the tokens."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.round.machine import RoundMachine
from coordinator.sequence.messages import Action, FromTarget, Phase, Signal
from paceline.core.errors import InternalError, ResourceExhaustedError
from paceline.core.messages import PromptLogprobs, RoundVerdict, SequenceFailed
from paceline.core.types import TokenLogprobs, Verdict
from tests.unit.coordinator.machines import make_machine
from tests.unit.coordinator.test_round import error_of


def entry(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -1.0, 1)


def begun(**sampling: Any) -> RoundMachine:
    """A machine whose first round is with the target."""
    machine = make_machine(**sampling)
    machine.handle(Signal.TARGET_READY, 0.0)
    assert machine.state.phase is Phase.VERIFYING
    return machine


def report(machine: RoundMachine, start: int, tokens: tuple[int, ...], **address: int) -> list[Action]:
    where = {"epoch": 1, "round": 1, **address}
    event = PromptLogprobs("s", **where, start=start, logprobs=tuple(entry(token) for token in tokens))
    return machine.handle(event, 1.0)


def judge(machine: RoundMachine, *logprobs: int) -> list[Action]:
    told = tuple(entry(token) for token in logprobs)
    verdict = Verdict(0, (7,), len(machine.state.ledger), logprobs=told)
    return machine.handle(RoundVerdict("s", 1, machine.state.round, verdict), 2.0)


def test_a_commit_carries_its_log_probabilities() -> None:
    (emit, *_) = judge(begun(logprobs=1), 7)
    assert emit.commit.logprobs == (entry(7),)


def test_a_verdict_with_wrong_reports_ends_the_request() -> None:
    assert isinstance(error_of(judge(begun(logprobs=1))), InternalError)
    assert isinstance(error_of(judge(begun(), 7)), InternalError)


def test_a_prompt_is_reported_during_its_prefill() -> None:
    machine = begun(prompt_logprobs=0)
    (emit,) = report(machine, 1, (2,))
    assert emit.commit.prompt_logprobs == (entry(2),)
    assert report(machine, 1, (2,)) == []
    # It is progress: the target has its time for a round from here on.
    assert machine.state.deadline == 11.0
    assert len(report(machine, 2, (3,))) == 1
    (emit, *_) = judge(machine)
    assert emit.commit.token_ids == (7,)


def test_reports_of_another_round_or_epoch_are_dropped() -> None:
    machine = begun(prompt_logprobs=0)
    assert report(machine, 1, (2, 3), epoch=2) == []
    assert report(machine, 1, (2, 3), round=2) == []
    assert machine.state.ledger.lacks_prompt_logprobs


@pytest.mark.parametrize(("start", "tokens"), [(2, (3,)), (1, (9,)), (0, (1, 2, 3))])
def test_an_unfitting_report_ends_the_request(start: int, tokens: tuple[int, ...]) -> None:
    assert isinstance(error_of(report(begun(prompt_logprobs=0), start, tokens)), InternalError)


def test_a_verdict_before_the_prompt_report_ends_the_request() -> None:
    machine = begun(prompt_logprobs=0)
    report(machine, 1, (2,))
    assert isinstance(error_of(judge(machine)), InternalError)


def test_a_report_during_a_wait_for_blocks_is_kept() -> None:
    """The round was sent twice: one is refused, the other's verdict is repeated without reports."""
    machine = begun(prompt_logprobs=0)
    report(machine, 1, (2,))
    refused = SequenceFailed("s", 1, 1, ResourceExhaustedError("no blocks"))
    machine.handle(FromTarget(refused), 1.0)
    assert machine.state.phase is Phase.WAITING
    assert len(report(machine, 2, (3,))) == 1
    assert machine.state.deadline is None
    machine.handle(Signal.BLOCKS_FREED, 2.0)
    (emit, *_) = judge(machine)
    assert emit.commit.token_ids == (7,)
