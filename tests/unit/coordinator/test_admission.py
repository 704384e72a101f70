"""Admission: running, waiting, and waiting for blocks before others are admitted."""

from __future__ import annotations

import pytest

import coordinator.scheduling.dispatcher as dispatcher_module
from coordinator.sequence.messages import Phase
from paceline.core.errors import ResourceExhaustedError, UnavailableError
from tests.unit.coordinator.test_dispatcher import Service, parts

MANY = 300
THEIRS = ResourceExhaustedError("no blocks", retry_after=1.0)
"""What a worker says where others hold blocks, whoever's they are."""


@pytest.fixture(autouse=True)
def _sweeps_do_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_module, "SWEEP_SECONDS", 0)


def test_many_sequences_may_end_as_they_begin() -> None:
    """Admission must not recurse from one sequence's end into the next one's start."""
    service = Service(max_running=1, max_waiting=MANY + 100)
    (target,) = service.targets
    service.lose(target)
    waiting = [service.submit() for _ in range(MANY)]
    target.known.max_model_len, target.ready = 2, True  # as long as the prompts
    service.it.link_ready(target)  # type: ignore[arg-type]
    for running in waiting:
        (error,) = parts(running)
        assert isinstance(error, UnavailableError)
    assert (service.it.running, service.it.waiting, service.it.failed, target.load) == (0, 0, MANY, 0)


def test_sequences_behind_one_ending_at_once_are_admitted() -> None:
    service = Service(max_running=1)
    first, fails, next_one, last = (service.submit() for _ in range(4))
    fails.machine.state.ledger.token_ids += [3] * 50
    service.it.cancel(first)
    assert isinstance(parts(fails)[0], UnavailableError)
    assert (next_one.machine.state.phase, last.admitted) == (Phase.VERIFYING, False)
    assert (service.it.running, service.it.waiting) == (1, 1)


def test_the_oldest_retries_for_blocks_when_its_worker_said() -> None:
    """Blocks may be freed by sequences of other coordinators."""
    service = Service()
    _holds, waits, later = (service.submit() for _ in range(3))
    service.fail(waits, error=THEIRS)
    service.fail(later, error=THEIRS)
    service.clock.now = 0.9
    service.sweep()
    assert waits.machine.state.phase is Phase.WAITING
    service.clock.now = 1.0
    service.sweep()
    assert (waits.machine.state.phase, later.machine.state.phase) == (Phase.VERIFYING, Phase.WAITING)
    service.fail(waits, error=THEIRS)
    service.clock.now = 1.9
    service.sweep()
    assert waits.machine.state.phase is Phase.WAITING
    service.clock.now = 2.0
    service.sweep()
    service.answer(waits, 5)
    assert later.machine.state.phase is Phase.VERIFYING, "the next one may try"


def test_without_a_retry_time_blocks_are_awaited_until_an_end() -> None:
    service = Service()
    holds, waits = service.submit(), service.submit()
    service.fail(waits)
    service.clock.now = 5.0
    service.sweep()
    assert waits.machine.state.phase is Phase.WAITING
    service.it.cancel(holds)
    assert waits.machine.state.phase is Phase.VERIFYING


def test_nobody_is_admitted_before_one_retrying_for_blocks() -> None:
    """A newcomer would take the blocks that it waits for."""
    service = Service()
    _holds, waits = service.submit(), service.submit()
    service.fail(waits, error=THEIRS)
    newcomer = service.submit()
    service.clock.now = 1.0
    service.sweep()
    assert (waits.machine.state.phase, newcomer.admitted) == (Phase.VERIFYING, False)
    service.fail(waits, error=THEIRS)
    service.clock.now = 2.0
    service.sweep()
    assert not newcomer.admitted
    service.answer(waits, 5)
    assert newcomer.admitted


@pytest.mark.parametrize("goes", ["cancelled", "lost"])
def test_an_ended_sequence_retrying_for_blocks_blocks_nobody(goes: str) -> None:
    service = Service(targets=1)
    holds, waits = service.submit(), service.submit()
    service.fail(waits, error=THEIRS)
    newcomer = service.submit()
    service.clock.now = 1.0
    service.sweep()
    if goes == "cancelled":
        service.it.cancel(waits)
    else:
        service.lose(service.targets[0])
        service.it.cancel(holds)
    assert newcomer.admitted
