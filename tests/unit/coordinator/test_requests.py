"""The registry of requests: readers, held requests, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

from coordinator.requests.registry import Request, Requests
from coordinator.scheduling.dispatcher import Dispatcher
from coordinator.scheduling.running_sequence import Running
from coordinator.sequence.ledger import Commit
from coordinator.sequence.messages import Phase
from coordinator.sequence.replay_buffer import ReplayBuffer
from paceline.core import limits
from paceline.core.clock import ManualClock
from paceline.core.errors import (
    AlreadyExistsError,
    CancelledError,
    DeadlineExceededError,
    InternalError,
    NotFoundError,
    StaleEpochError,
    UnavailableError,
)
from paceline.core.types import AcceptanceMode, SamplingParams, SpeculationParams, TokenLogprobs, TokenOrigin
from paceline.rpc.codec import GenerateCall, Resumption
from tests.unit.coordinator.machines import make_machine

FOR_EVER = math.inf


class Service:
    """Requests over a dispatcher without workers: tokens are committed by hand."""

    def __init__(self, seconds: float = 30.0) -> None:
        self.clock = ManualClock(1000.0)
        self.dispatcher = Dispatcher(100, 100, self.clock)
        self.it = Requests(self.dispatcher, seconds, self.clock, unread_timeout=60.0)
        self.calls = contextlib.ExitStack()

    def begin(self, name: str = "r", principal: str = "", n: int = 1, *, resumable: bool = True) -> Request:
        sampling = SamplingParams(max_tokens=20, seed=1, n=n)
        call = GenerateCall(name, "text", sampling, SpeculationParams(), resumable=resumable)
        request = Request(principal, call, (1, 2), "")
        self.it.add(request)
        request.begun = True
        for choice in range(n):
            name_of_choice = f"{principal}{name}{choice}"
            asked = {"max_tokens": 20, "n": n}
            machine = make_machine(
                (1, 2), name=name_of_choice, vocabulary=26, max_model_len=50, choice=choice, **asked
            )
            record = ReplayBuffer() if resumable else None
            request.choices.append(self.dispatcher.submit(machine, record))
        return request

    def lose(self, request: Request, deadline: float = FOR_EVER) -> None:
        assert request.reader is not None
        self.it.leave(request, request.reader, lost=True, deadline=deadline)

    def done(self, request: Request) -> None:
        """All was sent."""
        assert request.reader is not None
        self.it.leave(request, request.reader, lost=False, deadline=FOR_EVER)

    def read(self, *requests: Request) -> asyncio.Task[Any]:
        """A call that reads them all, and is stuck."""

        async def stuck() -> None:
            await asyncio.Event().wait()

        task = asyncio.create_task(stuck())
        for request in requests:
            self.calls.enter_context(self.it.reading(request, FOR_EVER)).task = task
        return task

    def pass_time(self, seconds: float) -> None:
        self.it.expire()
        self.clock.advance(seconds)
        self.it.expire()

    def resume(self, request: Request, *received: tuple[int, ...], principal: str = "") -> Request | None:
        sampling = SamplingParams(max_tokens=20, n=len(received))
        call = resuming(*received, request_id=request.call.request_id, sampling=sampling)
        return self.it.resume(principal, call)


def resuming(*received: tuple[int, ...], **changes: Any) -> GenerateCall:
    call = GenerateCall("r", "text", SamplingParams(max_tokens=20), SpeculationParams(), resumable=True)
    return replace(call, resumption=Resumption(tuple(map(len, received)), received), **changes)


def commit(running: Running, *tokens: int, logprobs: int | None = None) -> None:
    """As a verdict would, with so many of the likeliest tokens of each."""
    told = () if logprobs is None else [reported(token, logprobs) for token in tokens]
    made = running.state.ledger.commit([(token, TokenOrigin.TARGET) for token in tokens], told)
    running.replay.add(made)
    running.parts.put_nowait(made)


def finish(request: Request, logprobs: int | None = None) -> None:
    """Each of its choices gets all 20 tokens."""
    for running in request.choices:
        commit(running, *range(20), logprobs=logprobs)


def reported(token: int, likeliest: int) -> TokenLogprobs:
    return TokenLogprobs(token, -1.0, 1, tuple(range(likeliest)), (-1.0,) * likeliest)


def ended(request: Request) -> bool:
    return all(running.state.phase is Phase.DONE for running in request.choices)


def now(reading: Coroutine[Any, Any, Any]) -> Any:
    """What can be read without waiting."""
    try:
        reading.send(None)
    except StopIteration as result:
        return result.value
    reading.close()
    return None


def test_a_lost_client_may_return_in_time() -> None:
    service = Service()
    request = service.begin()
    commit(request.choices[0], 4, 5)
    service.lose(request)
    assert service.it.held == [request]
    service.pass_time(29.9)
    assert not ended(request)
    assert service.resume(request, (4,)) is request
    assert service.it.held == []
    service.pass_time(1000.0)
    assert not ended(request)


def test_a_client_that_does_not_return_frees_everything() -> None:
    service = Service()
    request = service.begin(n=3)
    service.lose(request)
    service.pass_time(30.0)
    assert ended(request)
    assert len(service.it) == service.dispatcher.running == 0
    assert service.it.ended.is_set()
    assert service.resume(request, (), (), ()) is None


def test_requests_that_cannot_resume_are_not_held() -> None:
    """Not resumable, not yet announced, read to the end, or holding switched off."""
    service = Service()
    plain = service.begin("plain", resumable=False)
    service.lose(plain)
    early = service.begin("early")
    early.begun = False
    service.lose(early)
    finished = service.begin("finished")
    service.done(finished)
    off = Service(seconds=0.0)
    never = off.begin("never")
    off.lose(never)
    assert all(map(ended, (plain, early, finished, never)))
    assert len(service.it) == len(off.it) == 0


def test_requests_are_not_held_past_their_deadline() -> None:
    service = Service()
    late = service.begin("late")
    service.lose(late, deadline=service.clock.now)
    assert ended(late)
    soon = service.begin("soon")
    service.lose(soon, deadline=service.clock.now + 5.0)
    service.pass_time(5.0)
    assert ended(soon)


def test_an_ended_request_may_be_resumed_until_its_id_is_reused() -> None:
    service = Service()
    request = service.begin()
    finish(request)
    assert request.ended
    service.done(request)
    assert service.resume(request, (0, 1, 2)) is request
    service.lose(request)
    assert service.it.resume("", request.call) is None
    other = service.begin()
    assert service.it.held == []
    assert other.reader is not None


def counting(*requests: Request) -> set[str]:
    """The names of those that count, for as long as they do."""
    counted = {request.call.request_id for request in requests}
    for request in requests:
        request.counted.callback(counted.discard, request.call.request_id)
    return counted


def test_an_ended_request_is_held_but_not_counted() -> None:
    service = Service()
    whole, lost = service.begin("whole"), service.begin("lost")
    counted = counting(whole, lost)
    finish(whole)
    service.done(whole)
    service.lose(lost)
    assert service.it.held == [whole, lost]
    assert counted == {"lost"}, "it runs still"
    finish(lost)
    service.it.expire()
    assert service.it.held == [whole, lost]
    assert counted == set()


def test_an_ended_unread_request_is_not_counted() -> None:
    """Its client may never read the end."""
    service = Service()
    whole, failed = service.begin("whole"), service.begin("failed")
    counted = counting(whole, failed)
    service.it.expire()
    assert counted == {"whole", "failed"}, "they run still"
    finish(whole)
    service.dispatcher.abort(failed.choices[0], DeadlineExceededError("too old"))
    service.it.expire()
    assert counted == set()
    assert (len(service.it), service.it.held) == (2, []), "both are read as before"


async def test_a_slow_reader_is_not_cut() -> None:
    """While sequences run, the dispatcher cuts unread ones."""
    service = Service()
    request = service.begin()
    reading, reader = service.read(request), request.reader
    assert reader is not None
    service.pass_time(1000.0)
    assert reading.cancelling() == 0
    finish(request)
    for _ in range(5):
        service.pass_time(59.0)
        assert reading.cancelling() == 0
        reader.took(service.clock.now)
    service.pass_time(60.0)
    assert reading.cancelling() == 1
    service.pass_time(60.0)
    assert reading.cancelling() == 1, "it is told once"


async def test_a_cut_request_is_reopened_and_an_ended_one_held() -> None:
    """Reopening a failed request would repeat the failing round."""
    service = Service()
    done, cut, failed = service.begin("done"), service.begin("cut"), service.begin("failed", n=2)
    reading = service.read(done, cut, failed)
    finish(done)
    error = InternalError("for example")
    service.dispatcher.abort(cut.choices[0], UnavailableError("for example"))
    service.dispatcher.abort(failed.choices[0], UnavailableError("for example"))
    service.dispatcher.abort(failed.choices[1], error)
    readers = [request.reader for request in (done, cut, failed)]
    service.pass_time(60.0)
    assert reading.cancelling() == 1
    assert [reader and reader.cut_with for reader in readers] == [None, None, error]
    for request in (done, cut, failed):
        service.lose(request)
    assert service.it.held == [done, failed]
    assert service.resume(cut, ()) is None
    assert service.resume(failed, (), ()) is failed
    assert now(service.dispatcher.next_part(failed.choices[1])) is error


async def test_a_call_reading_another_request_is_not_cut() -> None:
    service = Service()
    done, runs = service.begin("done"), service.begin("runs")
    reading = service.read(done, runs)
    finish(done)
    service.pass_time(1000.0)
    assert reading.cancelling() == 0
    finish(runs)
    service.pass_time(59.0)
    assert reading.cancelling() == 0, "its time begins with the end of the last one"
    service.pass_time(1.0)
    assert reading.cancelling() == 1


async def test_a_call_whose_request_was_resumed_elsewhere_ends() -> None:
    service = Service()
    request = service.begin()
    before, first = service.read(request), request.reader
    assert service.resume(request, ()) is request
    present = service.read(request)
    service.pass_time(60.0)
    assert (before.cancelling(), present.cancelling()) == (1, 0)
    assert isinstance(first.cut_with, StaleEpochError), "or it would take the request back"


def test_reusing_an_id_ends_the_held_request() -> None:
    service = Service()
    request = service.begin()
    finish(request)
    service.done(request)
    service.it.ended.clear()
    service.begin()
    assert service.it.ended.is_set()


def test_ended_requests_make_room_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_HELD_REQUESTS", 1)
    service = Service()
    live, done = service.begin("live"), service.begin("done")
    service.lose(live)
    finish(done)
    service.clock.advance(1.0)
    service.lose(done)
    assert service.it.held == [live]


def test_the_longest_abandoned_request_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_HELD_REQUESTS", 2)
    service = Service()
    requests = [service.begin(f"r{i}") for i in range(4)]
    for request in requests:
        service.lose(request)
        service.clock.advance(1.0)
    assert [ended(request) for request in requests] == [True, True, False, False]


def names(requests: list[Request]) -> list[str]:
    return [request.call.request_id for request in requests]


def test_log_probabilities_of_ended_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may take gigabytes."""
    monkeypatch.setattr(limits, "MAX_HELD_LOGPROBS", 3 * 20 * 5)
    service = Service()
    runs, plain = service.begin("runs"), service.begin("plain")
    commit(runs.choices[0], *range(19), logprobs=20)
    finish(plain)
    service.lose(runs)
    service.done(plain)
    for i in range(6):
        request = service.begin(f"r{i}")
        finish(request, logprobs=4)
        service.clock.advance(1.0)
        service.done(request)
    assert names(service.it.held) == ["plain", "r3", "r4", "r5", "runs"]
    assert service.resume(request, tuple(range(20))) is request
    # Once it has ended it is the oldest of those, and too large whether or not there are others.
    commit(runs.choices[0], 19, logprobs=20)
    service.it.expire()
    assert names(service.it.held) == ["plain", "r3", "r4"]


def test_log_probabilities_of_choices_and_prompt_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed requests' too; requests without any are not dropped."""
    monkeypatch.setattr(limits, "MAX_HELD_LOGPROBS", 2 * 20 + 3)
    service = Service()
    failed, whole = service.begin("failed"), service.begin("whole", n=2)
    record = failed.choices[0].replay
    record.add(Commit(0, (), (), "", prompt_logprobs=(reported(2, 2),)))
    service.dispatcher.abort(failed.choices[0], InternalError("for example"))
    service.lose(failed)
    finish(whole, logprobs=0)
    service.done(whole)
    assert (failed.num_logprobs, whole.num_logprobs) == (3, 40)
    assert names(service.it.held) == ["whole", "failed"]
    monkeypatch.setattr(limits, "MAX_HELD_LOGPROBS", 2 * 20 + 2)
    service.it.expire()
    assert names(service.it.held) == ["failed"]


def test_an_id_in_use_is_refused() -> None:
    service = Service()
    request = service.begin("mine")
    with pytest.raises(AlreadyExistsError) as caught:
        service.begin("mine")
    assert caught.value.field == "request_id"
    with pytest.raises(AlreadyExistsError, match="running"):
        service.it.resume("", request.call)
    plain = service.begin("plain", resumable=False)
    with pytest.raises(AlreadyExistsError, match="running"):
        service.resume(plain, ())
    assert not ended(request)


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "other"},
        {"sampling": SamplingParams(max_tokens=21)},
        {"sampling": SamplingParams(max_tokens=20, seed=2)},
        {"speculation": SpeculationParams(num_speculative_tokens=1)},
        {"cache_salt": "another"},
    ],
)
def test_only_the_same_request_resumes(change: dict[str, Any]) -> None:
    service = Service()
    request = service.begin()
    with pytest.raises(AlreadyExistsError, match="a different request"):
        service.it.resume("", resuming((), **change))
    assert service.it.resume("", resuming(())) is request


def test_a_resume_may_name_the_servers_mode() -> None:
    """A resume on another server must name it, and the client cannot know where it resumes."""
    service = Service()
    request = service.begin()
    same = replace(request.call, resumption=Resumption((0,), ((),)))
    used, other = (
        replace(same, speculation=SpeculationParams(acceptance=mode))
        for mode in (AcceptanceMode.COUPLED, AcceptanceMode.BLOCK)
    )
    with pytest.raises(AlreadyExistsError, match="a different request"):
        service.it.resume("", other)
    assert service.it.resume("", same) is request
    assert service.it.resume("", used) is request
    request.call = replace(request.call, speculation=SpeculationParams(acceptance=AcceptanceMode.COUPLED))
    assert service.it.resume("", used) is request
    with pytest.raises(AlreadyExistsError, match="a different request"):
        service.it.resume("", same)


def test_other_principals_cannot_resume_or_cancel() -> None:
    service = Service()
    request = service.begin("r", principal="ann")
    service.lose(request)
    assert service.resume(request, (), principal="bob") is None
    with pytest.raises(NotFoundError):
        service.it.cancel("bob", "r")
    others = service.begin("r", principal="bob")
    assert others is not request
    assert service.resume(request, (), principal="ann") is request


@pytest.mark.parametrize("received", [(4, 5, 6), (4, 9)])
def test_a_client_served_elsewhere_is_ahead(received: tuple[int, ...]) -> None:
    """The client's tokens decide: the held request ends and is reopened from them."""
    service = Service()
    request = service.begin()
    commit(request.choices[0], 4, 5)
    service.lose(request)
    assert service.resume(request, received) is None
    assert ended(request)
    assert len(service.it) == 0


def test_a_reader_of_a_request_served_elsewhere_gets_an_error() -> None:
    """Otherwise it would wait for parts that cannot come."""
    service = Service()
    request = service.begin()
    (running,) = request.choices
    commit(running, 4, 5)
    assert service.resume(request, (4, 9)) is None
    before = running.parts
    assert isinstance(now(service.dispatcher.next_part(running, before)), Commit)
    assert isinstance(now(service.dispatcher.next_part(running, before)), StaleEpochError)


def test_an_undelivered_error_is_for_the_returning_client() -> None:
    """One of two choices fails while the other's part is on its way."""
    service = Service()
    request = service.begin(n=2)
    failed = request.choices[1]
    error = InternalError("broken")
    service.dispatcher.abort(failed, error)
    assert now(service.dispatcher.next_part(failed)) is error
    service.lose(request)
    assert service.resume(request, (), ()) is request
    assert now(service.dispatcher.next_part(failed)) is error
    assert failed.parts.empty()


def test_the_previous_reader_gets_an_error_and_nothing_more() -> None:
    service = Service()
    request = service.begin()
    (running,) = request.choices
    first, before = request.reader, running.parts
    commit(running, 4, 5)
    assert service.resume(request, ()) is request
    assert isinstance(now(service.dispatcher.next_part(running, before)), StaleEpochError)
    commit(running, 6)
    assert before.empty()
    part = now(service.dispatcher.next_part(running))
    assert part.token_ids == (6,)
    # Its own end is no longer the request's.
    assert first is not None
    service.it.leave(request, first, lost=False, deadline=FOR_EVER)
    assert not ended(request)


def test_a_paused_sequence_goes_on_for_a_returning_client() -> None:
    service = Service()
    request = service.begin()
    (running,) = request.choices
    running.unread, running.behind_since = limits.MAX_UNREAD_TOKENS + 1, service.clock.now
    running.state.phase, running.state.client_behind = Phase.PAUSED, True
    assert running.read
    service.lose(request)
    assert not running.read
    assert service.resume(request, ()) is request
    assert (running.unread, running.behind_since, running.read) == (0, None, True)
    assert running.state.phase is not Phase.PAUSED


def test_an_unread_error_is_for_the_returning_client() -> None:
    service = Service()
    request = service.begin()
    (running,) = request.choices
    commit(running, 4)
    service.lose(request)
    error = InternalError("for example")
    service.dispatcher.abort(running, error)
    assert service.resume(request, ()) is request
    assert now(service.dispatcher.next_part(running)) is error


def test_cancelling_ends_a_request_read_or_held() -> None:
    service = Service()
    read, held = service.begin("read"), service.begin("held")
    service.lose(held)
    for name in ("read", "held"):
        service.it.cancel("", name)
    assert all(map(ended, (read, held)))
    assert isinstance(now(service.dispatcher.next_part(read.choices[0])), CancelledError)
    with pytest.raises(NotFoundError):
        service.it.cancel("", "read")
    service.lose(read)
    assert len(service.it) == 0


def test_choices_ended_by_a_failure_are_not_aborted() -> None:
    """Only those whose client left are."""
    service = Service()
    failing, left = service.begin("failing", n=3), service.begin("left", n=2)
    error = InternalError("for example")
    service.dispatcher.abort(failing.choices[1], error)
    for request in (failing, left):
        service.done(request)
        assert ended(request)
    assert [running.error for running in failing.choices] == [error] * 3
    assert [running.error for running in left.choices] == [None] * 2
    assert service.dispatcher.failed == 1


def test_a_cancelled_id_is_free_at_once() -> None:
    service = Service()
    first = service.begin()
    service.it.cancel("", "r")
    second = service.begin()
    service.lose(first)
    assert len(service.it) == 1
    assert not ended(second)


def test_a_stopping_coordinator_holds_nothing() -> None:
    service = Service()
    held, read = service.begin("held"), service.begin("read")
    service.lose(held)
    service.it.hold_no_more()
    assert ended(held)
    assert not ended(read)
    service.lose(read)
    assert ended(read)


async def test_the_sweep_ends_expired_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.requests.registry.SWEEP_SECONDS", 0)
    service = Service()
    request = service.begin()
    service.lose(request)
    service.clock.advance(31.0)
    sweeping = asyncio.create_task(service.it.sweep())
    await asyncio.wait_for(service.it.ended.wait(), 30)
    sweeping.cancel()
    assert ended(request)
