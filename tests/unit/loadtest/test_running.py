"""Loops of a load against a scripted client: times of sending, and recorded outcomes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.client import AsyncClient, GenerationChunk, SamplingParams, SpeculationParams
from paceline.core.clock import ManualClock
from paceline.core.errors import InvalidArgumentError, PacelineError, ResourceExhaustedError, UnavailableError
from paceline.core.types import AcceptanceMode
from paceline.loadtest.plan import Ask
from paceline.loadtest.running import FAILURE_PAUSE, Load, _pause_after

SPECULATION = SpeculationParams(num_speculative_tokens=3)
Step = Callable[[int], Awaitable[None]]


class FakeStream:
    """Two chunks of a token and an empty one behind them; before each the test's `step` is awaited."""

    def __init__(self, client: FakeClient, seed: int) -> None:
        self._client, self._seed = client, seed
        self.result: Any = None
        self.num_resumes = 1

    async def __aiter__(self) -> AsyncIterator[GenerationChunk]:
        client = self._client
        client.running += 1
        client.most = max(client.most, client.running)
        try:
            for index in range(2):
                await client.step(self._seed)
                yield GenerationChunk(index, (7,), "", ())
            if client.fails and (error := client.fails(self._seed)):
                raise error
            yield GenerationChunk(2, (), "", (), finish_reason="length")
        finally:
            client.running -= 1
        self.result = SimpleNamespace(
            acceptance=AcceptanceMode.COUPLED,
            finish_reason="length",
            usage=SimpleNamespace(prompt_tokens=4),
            speculative_decoding=None,
            timings=None,
            token_ids=(7, 7),
        )


class FakeClient:
    """Notes what it was asked."""

    def __init__(self, step: Step, fails: Callable[[int], Exception | None] | None = None) -> None:
        self.step, self.fails = step, fails
        self.asked: list[dict[str, Any]] = []
        self.running = self.most = 0

    def stream(self, prompt: Any, sampling: SamplingParams, **options: Any) -> FakeStream:
        assert sampling.seed is not None
        self.asked.append({"prompt": prompt, "sampling": sampling, **options})
        return FakeStream(self, sampling.seed)


async def a_turn(_number: int) -> None:
    await asyncio.sleep(0)


def two_seconds_of(clock: ManualClock) -> Step:
    """A step that takes them."""

    async def step(_number: int) -> None:
        await asyncio.sleep(0)
        clock.advance(2.0)

    return step


def load(client: FakeClient, **changes: Any) -> Load:
    values: dict[str, Any] = {
        "cache_salt": "salt-{}".format,
        "timeout": 9.0,
        "keep_tokens": True,
        "stopped": asyncio.Event(),
        "progress": lambda _load: None,
    } | changes
    return Load(cast(AsyncClient, client), SPECULATION, **values)


def asks(most: int, due: Callable[[int], float | None] = lambda _number: None) -> list[Ask]:
    return [Ask(i, due(i), (i,), SamplingParams(seed=i)) for i in range(most)]


async def test_a_closed_loop_keeps_its_places_busy() -> None:
    client = FakeClient(a_turn)
    run = load(client)
    await run.closed(iter(asks(17)), 3, None)
    assert client.most == 3
    assert [asked["prompt"] for asked in client.asked] == [(i,) for i in range(17)]
    assert sorted(outcome.number for outcome in run.outcomes) == list(range(17))
    assert run.running == run.failed == 0


async def test_a_request_is_sent_and_its_answer_recorded() -> None:
    client = FakeClient(a_turn)
    run = load(client)
    (only,) = asks(1)
    outcome = await run.send(only)
    assert client.asked == [
        {
            "prompt": (0,),
            "sampling": only.sampling,
            "speculation": SPECULATION,
            "cache_salt": "salt-0",
            "timeout": 9.0,
        }
    ]
    assert run.outcomes == [outcome]
    assert list(outcome.counts) == [1, 1]
    assert outcome.num_resumes == 1
    assert (outcome.answer.prompt_tokens, outcome.answer.token_ids) == (4, (7, 7))


async def test_tokens_are_kept_only_for_comparison() -> None:
    outcome = await load(FakeClient(a_turn), keep_tokens=False).send(asks(1)[0])
    assert outcome.answer.token_ids == ()


async def test_a_closed_loop_begins_nothing_after_its_duration() -> None:
    clock = ManualClock()

    async def a_second(_number: int) -> None:
        clock.advance(1.0)

    run = load(FakeClient(a_second), clock=clock)
    await run.closed((Ask(i, None, (i,), SamplingParams(seed=i)) for i in count()), 1, 5.0)
    assert [outcome.sent for outcome in run.outcomes] == [0.0, 2.0, 4.0]
    assert [outcome.ended for outcome in run.outcomes] == [2.0, 4.0, 6.0]
    assert run.outcomes[1].ttft == 1.0


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    """The first request ends when the last has begun."""
    begun = asyncio.Event()

    async def until_the_last(number: int) -> None:
        if number == 4:
            begun.set()
        await begun.wait()

    run = load(FakeClient(until_the_last))
    await asyncio.wait_for(run.open(iter(asks(5, lambda i: i / 1000)), None, None), 30)
    assert len(run.outcomes) == 5
    assert all(outcome.sent >= outcome.due for outcome in run.outcomes)


async def test_a_request_waiting_for_a_place_is_late() -> None:
    clock = ManualClock()
    client = FakeClient(two_seconds_of(clock))
    run = load(client, clock=clock)
    await run.open(iter(asks(3, lambda _i: 0.0)), 1, None)
    assert client.most == 1
    assert [outcome.sent for outcome in run.outcomes] == [0.0, 4.0, 8.0]
    assert [outcome.due for outcome in run.outcomes] == [0.0, 0.0, 0.0]
    assert [outcome.ttft for outcome in run.outcomes] == [2.0, 6.0, 10.0]


async def test_a_late_loop_still_receives_answers() -> None:
    """All requests are due at once."""
    ended_while_sending = []

    def due(number: int) -> float:
        ended_while_sending.append(len(run.outcomes))
        return 0.0

    run = load(FakeClient(a_turn))
    await run.open((Ask(i, due(i), (i,), SamplingParams(seed=i)) for i in range(200)), None, None)
    assert ended_while_sending[-1] > 0


@pytest.mark.parametrize("rate", [True, False])
async def test_a_stopped_load_waits_for_running_requests(rate: bool) -> None:
    stopped = asyncio.Event()

    async def stop_at_the_third(number: int) -> None:
        if number == 2:
            stopped.set()
        await asyncio.sleep(0)

    run = load(FakeClient(stop_at_the_third), stopped=stopped)
    if rate:
        await run.open(iter(asks(9, lambda i: i / 100)), None, None)
    else:
        await run.closed(iter(asks(9)), 1, None)
    assert [outcome.number for outcome in run.outcomes] == [0, 1, 2]
    assert all(outcome.answer for outcome in run.outcomes)


async def test_a_waiting_request_is_not_sent_after_a_stop() -> None:
    stopped = asyncio.Event()

    async def stop(_number: int) -> None:
        await asyncio.sleep(0.01)
        stopped.set()

    client = FakeClient(stop)
    await load(client, stopped=stopped).open(iter(asks(4, lambda _i: 0.0)), 1, None)
    assert len(client.asked) == 1


async def test_a_failure_is_recorded_with_its_tokens() -> None:
    error = ResourceExhaustedError("full", retry_after=0.001)
    run = load(FakeClient(a_turn, lambda number: error if number == 1 else None))
    await run.closed(iter(asks(3)), 1, None)
    assert [outcome.error for outcome in run.outcomes] == [None, error, None]
    assert [bool(outcome.answer) for outcome in run.outcomes] == [True, False, True]
    assert run.outcomes[1].completion_tokens == 2
    assert (run.failed, run.running) == (1, 0)


@pytest.mark.parametrize("rate", [True, False])
async def test_an_unexpected_error_ends_the_load(rate: bool) -> None:
    run = load(FakeClient(a_turn, lambda _number: ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        await (run.open(iter(asks(3, lambda _i: 0.0)), 1, None) if rate else run.closed(asks(3), 1, None))


@pytest.mark.parametrize("rate", [True, False])
async def test_an_unplannable_request_ends_the_load(rate: bool) -> None:
    """With its own error, not an exception group."""

    def planned() -> Iterator[Ask]:
        yield from asks(2, lambda _i: 0.0)
        raise InvalidArgumentError("min_tokens", "must not be greater than max_tokens")

    run = load(FakeClient(a_turn))
    with pytest.raises(InvalidArgumentError):
        await (run.open(planned(), None, None) if rate else run.closed(planned(), 3, None))


@pytest.mark.parametrize(
    ("error", "pause"),
    [
        (UnavailableError("down"), FAILURE_PAUSE),
        (ResourceExhaustedError("full"), FAILURE_PAUSE),
        (ResourceExhaustedError("full", retry_after=3.5), 3.5),
    ],
)
def test_a_client_of_a_closed_loop_pauses_after_a_failure(error: PacelineError, pause: float) -> None:
    assert _pause_after(error) == pause


async def test_requests_waiting_at_the_end_are_counted_unsent() -> None:
    clock = ManualClock()
    client = FakeClient(two_seconds_of(clock))
    run = load(client, clock=clock)
    await run.open(iter(asks(5, lambda _i: 0.0)), 1, 6.0)
    assert len(client.asked) == len(run.outcomes) == 2
    assert run.unsent == 3


async def test_a_pause_after_a_failure_ends_with_the_duration() -> None:
    error = ResourceExhaustedError("full", retry_after=1000.0)
    run = load(FakeClient(a_turn, lambda _number: error))
    await asyncio.wait_for(run.closed(iter(asks(3)), 1, 0.01), 30)
    assert len(run.outcomes) == 1


async def test_a_kept_error_does_not_hold_its_stream() -> None:

    def fails(_number: int) -> Exception:
        error = UnavailableError("gone")
        error.__cause__ = ValueError("what gRPC said")
        return error

    outcome = await load(FakeClient(a_turn, fails)).send(asks(1)[0])
    error = outcome.error
    assert (error.__traceback__, error.__cause__, error.__context__) == (None, None, None)
