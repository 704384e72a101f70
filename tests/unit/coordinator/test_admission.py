"""Admission: running, waiting, and waiting for blocks before others are admitted."""

from __future__ import annotations

import pytest
from harness.refusals import refused

from coordinator.scheduling.block_waiters import GRACE_SECONDS
from coordinator.sequence.messages import Phase
from paceline.core import limits
from paceline.core.errors import ResourceExhaustedError, UnavailableError
from paceline.core.messages import CloseSequence, OpenSequence, VerifyRound
from tests.unit.coordinator.service import (
    FULL,
    THEIRS,
    Service,
    failure_of,
    parts,
    phases,
    read,
    told,
    verdict_of,
)

MANY = 300
WAITING, VERIFYING = Phase.WAITING, Phase.VERIFYING


def test_excess_requests_wait_and_then_are_refused() -> None:
    service = Service(max_running=2, max_waiting=1)
    first, _, third = service.begin(3)
    assert (service.counts, third.admitted) == ((2, 1), False)
    with pytest.raises(ResourceExhaustedError, match="waiting already"):
        service.submit()
    service.it.cancel(first)
    assert (third.admitted, third.state.phase) == (True, VERIFYING)
    assert service.it.waiting == 0


def test_more_sequences_than_the_capacity_are_invalid() -> None:
    """Retrying would not help."""
    service = Service(max_running=2, max_waiting=1)
    service.it.check_fits(3)
    with refused("n"):
        service.it.check_fits(4)


def test_a_waiting_request_can_be_cancelled() -> None:
    service = Service(max_running=1, max_waiting=1)
    _, second = service.begin(2)
    service.it.cancel(second)
    assert service.counts == (1, 0)
    assert service.submit().admitted is False


def test_a_queued_request_has_no_recovery_deadline() -> None:
    """It waits behind a healthy target."""
    service = Service(max_running=1)
    first, second = service.submit(max_tokens=1), service.submit()
    first.state.deadline = None
    service.at(500.0)
    assert second.state.phase is Phase.NEW
    service.answer(first, 5)
    assert second.state.phase is VERIFYING
    service.sweep()
    assert parts(second) == []


def test_time_in_the_queue_is_not_time_without_a_target() -> None:
    """The recovery timeout begins with the loss of the target."""
    service = Service(max_running=1)
    first, second = service.begin(2)
    service.clock.now = 500.0
    service.lose(service.target)
    service.it.cancel(first)
    assert second.admitted
    for now in (500.0, 599.0):
        service.at(now)
        assert second.state.phase is Phase.NEW
    service.at(600.0)
    assert told(second) == [UnavailableError]


def test_many_sequences_may_end_as_they_begin() -> None:
    """Admission must not recurse from one sequence's end into the next one's start."""
    service = Service(max_running=1, max_waiting=MANY + 100)
    target = service.target
    service.lose(target)
    waiting = service.begin(MANY)
    target.known.max_model_len = 2  # as long as the prompts
    service.ready(target)
    assert [told(running) for running in waiting] == [[UnavailableError]] * MANY
    assert (service.counts, service.it.failed, target.load) == ((0, 0), MANY, 0)


def test_sequences_behind_one_ending_at_once_are_admitted() -> None:
    service = Service(max_running=1)
    first, fails, next_one, last = service.begin(4)
    fails.state.ledger.token_ids += [3] * 50
    service.it.cancel(first)
    assert told(fails) == [UnavailableError]
    assert (next_one.state.phase, last.admitted) == (VERIFYING, False)
    assert service.counts == (1, 1)


# ---- waiting for blocks -------------------------------------------------------------------------------


def test_a_sequence_out_of_blocks_waits_for_an_end() -> None:
    service = Service()
    first, second = service.submit(max_tokens=1), service.submit()
    service.fail(second)
    assert (second.state.phase, service.it.waiting) == (WAITING, 1)
    service.at(5.0)
    assert second.state.phase is WAITING, "no time was named after which to try again"
    service.answer(first, 5)
    assert (second.state.phase, service.it.waiting) == (VERIFYING, 0)


def test_the_oldest_retries_first_and_wakes_the_next() -> None:
    service = Service()
    first, second, third, fourth = service.begin(4)
    for running in (fourth, second, third):
        service.fail(running)
    service.it.cancel(first)
    assert phases(second, third, fourth) == [VERIFYING, WAITING, WAITING]
    service.answer(second, 5)
    assert phases(third, fourth) == [VERIFYING, WAITING]


def test_a_sequence_too_large_alone_is_failed() -> None:
    service = Service()
    running = service.submit()
    service.fail(running)
    assert running.state.phase is VERIFYING, "what held the blocks may have gone by now"
    service.clock.now = GRACE_SECONDS
    service.fail(running)
    assert parts(running) == [FULL]
    assert service.it.failed == 1


def test_blocks_of_an_ended_stream_are_waited_for() -> None:
    """The target may not yet have noticed the end of the last connection."""
    service = Service()
    running = service.submit()
    for _ in range(3):
        service.fail(running)
        service.after(0.1)
        assert running.state.phase is VERIFYING
    service.answer(running, 5)
    assert told(running) == [(5,)]
    assert running.alone_since is None


def test_blocks_of_another_coordinator_are_waited_for() -> None:
    """No sequence of this coordinator holds any."""
    service = Service()
    running = service.submit()
    for _ in range(5):
        service.fail(running, error=THEIRS)
        assert (running.state.phase, running.alone_since) == (WAITING, None)
        service.after(GRACE_SECONDS)
        assert running.state.phase is VERIFYING
    service.answer(running, 5)
    assert told(running) == [(5,)]


def test_two_sequences_out_of_blocks_at_once_both_go_on() -> None:
    """Both are closed, so their blocks are free."""
    service = Service()
    first, second = service.begin(2)
    service.fail(first, second)
    assert parts(first) == parts(second) == []
    assert {*phases(first, second)} == {WAITING, VERIFYING}
    goes_on, waits = sorted((first, second), key=lambda r: r.state.phase is WAITING)
    service.answer(goes_on, 5)
    assert waits.state.phase is VERIFYING


def test_a_sequence_out_of_blocks_at_anothers_end_goes_on() -> None:
    """The blocks it lacked are free by then."""
    service = Service()
    first, second = service.submit(max_tokens=1), service.submit()
    service.it.link_events(service.target, [verdict_of(first, 5), failure_of(second, FULL)])
    assert second.state.phase is VERIFYING


def test_two_sequences_too_large_alone_both_fail() -> None:
    service = Service()
    first, second = service.begin(2)
    for _ in range(10):
        for running in (first, second):
            if running.state.phase is VERIFYING:
                service.fail(running)
        service.after(GRACE_SECONDS / 2)
    assert parts(first) == parts(second) == [FULL]


def test_waiting_for_one_target_does_not_delay_another() -> None:
    """Blocks freed on one target wake the oldest sequence of that target."""
    service = Service(targets=2)
    holds, other, waits, starves = service.begin(4)
    assert [r.target for r in (holds, other, waits, starves)] == service.targets * 2
    service.fail(waits)
    service.fail(starves)
    assert service.it.waiting == 2
    service.it.cancel(other)
    assert phases(waits, starves) == [WAITING, VERIFYING]
    service.fail(starves)
    assert starves.state.phase is VERIFYING, "nobody holds any there"
    service.it.cancel(holds)
    assert waits.state.phase is VERIFYING


def test_a_sequence_waiting_for_blocks_can_be_cancelled() -> None:
    service = Service()
    first, second, third = service.begin(3)
    service.fail(second)
    service.fail(third)
    service.it.cancel(second)
    assert service.it.waiting <= 1
    service.it.cancel(first)
    assert third.state.phase is VERIFYING


def test_nobody_is_admitted_before_one_waiting_for_blocks() -> None:
    """The newest would be preempted first."""
    service = Service(max_waiting=1)
    first, second = service.begin(2)
    service.fail(second)
    third = service.submit()
    assert (third.admitted, service.it.waiting) == (False, 2)
    with pytest.raises(ResourceExhaustedError):
        service.submit()
    service.it.cancel(first)
    assert second.state.phase is VERIFYING
    assert third.admitted


def test_a_preempted_sequence_is_counted_once() -> None:
    service = Service()
    first, second = service.begin(2)
    service.fail(second)
    assert service.it.num_preemptions == 0, "it had none yet"
    service.answer(first, 5)
    service.fail(first)
    assert (second.state.phase, service.it.num_preemptions) == (WAITING, 1)
    service.fail(first)
    assert service.it.num_preemptions == 1


@pytest.mark.parametrize("busy", [0, 1])
def test_a_slow_clients_blocks_go_to_a_waiting_sequence(busy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise others would wait for the slow client."""
    monkeypatch.setattr(limits, "MAX_UNREAD_TOKENS", 1)
    service = Service()
    slow, *_, other = service.begin(2 + busy)
    for token in (5, 6, 7, 8):
        service.answer(slow, token)
    service.fail(other)
    assert phases(slow, other) == [Phase.PAUSED, WAITING]
    service.sweep()
    assert other.state.phase is VERIFYING
    assert service.target.types[-2:] == [CloseSequence, VerifyRound]
    assert service.it.num_preemptions == 1
    while slow.state.phase is Phase.PAUSED:
        read(service, slow)
    assert service.target.types[-2:] == [OpenSequence, VerifyRound]


def test_a_moving_sequences_blocks_go_to_a_waiting_one() -> None:
    service = Service(targets=2)
    late, other, waits, _, third = service.begin(5)
    assert late.target is waits.target is third.target is service.target
    service.it.cancel(other)
    service.fail(waits)
    service.clock.now = 9.5
    service.answer(third, 5)
    assert waits.state.phase is WAITING
    service.at(10.0)
    assert waits.state.phase is VERIFYING


# ---- blocks that others hold --------------------------------------------------------------------------


def test_the_oldest_retries_for_blocks_when_its_worker_said() -> None:
    """Blocks may be freed by sequences of other coordinators."""
    service = Service()
    _holds, waits, later = service.begin(3)
    service.fail(waits, error=THEIRS)
    service.fail(later, error=THEIRS)
    for due in (1.0, 2.0):
        service.at(due - 0.1)
        assert waits.state.phase is WAITING
        service.at(due)
        assert phases(waits, later) == [VERIFYING, WAITING]
        if due == 1.0:
            service.fail(waits, error=THEIRS)
    service.answer(waits, 5)
    assert later.state.phase is VERIFYING, "the next one may try"


def test_nobody_is_admitted_before_one_retrying_for_blocks() -> None:
    """A newcomer would take the blocks that it waits for."""
    service = Service()
    _holds, waits = service.begin(2)
    service.fail(waits, error=THEIRS)
    newcomer = service.submit()
    service.at(1.0)
    assert (waits.state.phase, newcomer.admitted) == (VERIFYING, False)
    service.fail(waits, error=THEIRS)
    service.at(2.0)
    assert not newcomer.admitted
    service.answer(waits, 5)
    assert newcomer.admitted


@pytest.mark.parametrize("goes", ["cancelled", "lost"])
def test_an_ended_sequence_retrying_for_blocks_blocks_nobody(goes: str) -> None:
    service = Service(targets=1)
    holds, waits = service.begin(2)
    service.fail(waits, error=THEIRS)
    newcomer = service.submit()
    service.at(1.0)
    if goes == "cancelled":
        service.it.cancel(waits)
    else:
        service.lose(service.target)
        service.it.cancel(holds)
    assert newcomer.admitted
