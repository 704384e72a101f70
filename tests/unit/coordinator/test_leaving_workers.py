"""Workers enter and leave while sequences run. Links are fakes."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.app import Coordinator
from coordinator.sequence.messages import Phase, Signal
from coordinator.workers.links import LinkState
from paceline.core.messages import CloseSequence, DraftRound, OpenSequence
from paceline.v1 import common_pb2
from tests.unit.coordinator.service import FakeLink, Service, told


def entered(service: Service, worker: Any) -> Any:
    service.it.link_entered(worker)
    return worker


def test_a_waiting_sequence_takes_an_entering_worker() -> None:
    service = Service(targets=0)
    running = service.submit(k=0)
    assert running.state.phase is Phase.NEW
    worker = entered(service, FakeLink())
    assert (running.target, running.state.phase) == (worker, Phase.VERIFYING)


def test_a_leaving_target_keeps_its_sequences_only() -> None:
    service = Service(targets=0)
    old = entered(service, FakeLink())
    staying = service.submit(k=0)
    new = entered(service, FakeLink())
    service.it.link_leaving(old)
    assert [service.submit(k=0).target for _ in range(3)] == [new] * 3
    service.answer(staying, 5)
    assert (staying.target, old.load) == (old, 1)
    assert old.flushed == len(old.sent), "its next round leaves at once"


def test_losing_a_leaving_target_costs_no_token() -> None:
    service = Service(targets=0)
    old = entered(service, FakeLink())
    running = service.submit(k=0, max_tokens=4)
    service.answer(running, 5)
    new = entered(service, FakeLink())
    service.it.link_leaving(old)
    service.answer(running, 6)
    service.lose(old)
    assert (running.target, old.load, new.load) == (new, 0, 1)
    service.answer(running, 7)
    service.answer(running, 8)
    assert told(running) == [(5,), (6,), (7,), (8,)]


def test_a_returning_worker_gets_sequences_again() -> None:
    service = Service(targets=0)
    worker = entered(service, FakeLink())
    service.it.link_leaving(worker)
    waiting = service.submit(k=0)
    assert waiting.target is None
    entered(service, worker)
    assert waiting.target is worker
    assert (service.it.workers.targets, service.it.workers.leaving) == ([worker], [])


def test_nothing_is_kept_of_a_worker_that_left() -> None:
    service = Service(targets=0)
    target, draft = entered(service, FakeLink()), entered(service, FakeLink("draft"))
    running = service.submit(max_tokens=5)
    service.answer(running, 5)
    service.propose(running)
    service.answer(running, 7, 8, 9, 1)
    assert running.ended
    for worker in (target, draft):
        service.it.link_leaving(worker)
        service.it.link_left(worker)
    workers = service.it.workers
    assert not workers.links
    assert not workers._heard
    assert not workers._silences


def test_answers_of_a_leaving_draft_count() -> None:
    """Otherwise it would be taken to hang."""
    service = Service(targets=0)
    entered(service, FakeLink())
    draft = entered(service, FakeLink("draft"))
    first = service.submit()
    service.deadline(first)
    service.it.link_leaving(draft)
    assert service.it.workers._silences[draft].deadlines == 1
    service.propose(first)
    assert service.it.workers._silences[draft].deadlines == 0


def test_a_departed_last_target_is_remembered(coordinator: Coordinator) -> None:
    for worker in list(coordinator.dispatcher.workers.targets):
        worker.admitted, worker.state = common_pb2.WorkerInfo(model="m", max_model_len=9), LinkState.READY
        coordinator._ready(worker)
        coordinator._leaving(worker)
        coordinator.dispatcher.link_left(worker)
    assert not coordinator.links
    assert not coordinator.serving
    assert coordinator.has_target
    assert coordinator.target_info().model == coordinator.known_name == "m"


def stopping(service: Service, worker: Any) -> None:
    worker.draining = True
    service.it.link_leaving(worker)


def test_a_stopping_target_hands_its_sequences_over() -> None:
    service = Service(targets=0)
    old = entered(service, FakeLink())
    running = service.submit(k=0, max_tokens=3)
    service.answer(running, 5)
    new = entered(service, FakeLink())
    stopping(service, old)
    assert (running.target, old.load, new.load) == (new, 0, 1)
    assert isinstance(old.sent[-1], CloseSequence)
    assert (running.state.losses, running.state.phase) == (0, Phase.VERIFYING)
    service.answer(running, 6)
    service.answer(running, 7)
    assert told(running) == [(5,), (6,), (7,)]


def test_a_stopping_target_keeps_them_until_another_is_ready() -> None:
    service = Service(targets=0)
    old = entered(service, FakeLink())
    running = service.submit(k=0)
    entered(service, FakeLink(ready=False))
    stopping(service, old)
    service.answer(running, 5)
    assert running.target is old
    new = entered(service, FakeLink())
    assert (running.target, old.load) == (new, 0)


@pytest.mark.parametrize("drafting", [True, False])
def test_a_stopping_draft_hands_its_sequences_over(drafting: bool) -> None:
    service = Service(targets=0)
    target = entered(service, FakeLink())
    old = entered(service, FakeLink("draft"))
    running = service.submit(max_tokens=9)
    service.answer(running, 5)
    if not drafting:
        service.propose(running)
    new = entered(service, FakeLink("draft"))
    stopping(service, old)
    assert (running.drafts[0], old.load, new.load) == (new, 0, 1)
    assert isinstance(old.sent[-1], CloseSequence)
    assert running.state.phase is Phase.VERIFYING
    if drafting:
        service.answer(running, 6)  # the target has begun a plain round by itself meanwhile
        service.answer(running, 7)
    else:
        service.answer(running, 7, 8, 9, 6)
    assert [type(command) for command in new.sent] == [OpenSequence, DraftRound]
    assert target.load == 1


def test_a_sequence_that_pauses_moves_and_goes_on() -> None:
    service = Service(targets=0)
    old = entered(service, FakeLink())
    running = service.submit(k=0)
    running.machine.handle(Signal.CLIENT_BEHIND, 0.0)
    service.answer(running, 5)
    assert running.state.phase is Phase.PAUSED
    new = entered(service, FakeLink())
    stopping(service, old)
    assert (running.target, running.state.phase) == (new, Phase.PAUSED)
    assert new.sent == []
    service.it._handle(running, Signal.CLIENT_CAUGHT_UP)
    service.answer(running, 6)
    assert told(running) == [(5,), (6,)]
