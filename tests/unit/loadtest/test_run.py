"""A whole load test against a recording client: warm-up, load, verification, stopping."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.client import (
    AcceptanceMode,
    AsyncClient,
    GenerationChunk,
    InvalidArgumentError,
    Model,
    SamplingParams,
    SpeculationParams,
)
from paceline.core.errors import CancelledError, PacelineError, UnavailableError
from paceline.loadtest import LoadConfig, LoadTest, Report
from paceline.loadtest.prompts import PromptLine
from paceline.loadtest.verifying import Difference

MODE = AcceptanceMode.COUPLED


@dataclass
class FakeStream:
    """One token, after `step`."""

    token: int
    step: Callable[[], Awaitable[None]]
    mode: AcceptanceMode
    stats: Any
    result: Any = None
    num_resumes: int = 0

    async def __aiter__(self) -> AsyncIterator[GenerationChunk]:
        await self.step()
        yield GenerationChunk(0, (self.token,), "", ())
        self.result = SimpleNamespace(
            acceptance=self.mode,
            finish_reason="length",
            usage=SimpleNamespace(prompt_tokens=4),
            speculative_decoding=self.stats.speculative_decoding,
            timings=self.stats.timings,
            token_ids=(self.token,),
        )


@dataclass
class FakeClient:
    """A server whose draft changes the token of one seed."""

    stats: Any
    wrong_seed: int | None = None
    mode: AcceptanceMode = MODE
    on_call: Callable[[int], None] = lambda _number: None
    hangs: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)
    address: str = "host:1"
    models_offered: tuple[Model, ...] = (Model("m", 100, 300),)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def models(self, *, timeout: float | None = None) -> tuple[Model, ...]:  # noqa: ASYNC109
        assert timeout
        return self.models_offered

    async def close(self) -> None:
        self.closed.set()

    def stream(
        self, prompt: Any, sampling: SamplingParams, *, speculation: SpeculationParams, **options: Any
    ) -> FakeStream:
        self.on_call(len(self.asked))
        self.asked.append({"prompt": prompt, "seed": sampling.seed, "drafts": speculation != PLAIN} | options)
        wrong = sampling.seed == self.wrong_seed and speculation != PLAIN
        return FakeStream(9 if wrong else 7, self._step, self.mode, self.stats)

    async def _step(self) -> None:
        await (self.closed.wait() if self.hangs and len(self.asked) > 1 else asyncio.sleep(0))
        if self.closed.is_set():
            raise CancelledError("the call was closed while it ran")


PLAIN = SpeculationParams(num_speculative_tokens=0)


def a_test(client: FakeClient, **settings: Any) -> LoadTest:
    temperature = settings.pop("temperature", 1.0)
    params = {name: settings.pop(name) for name in ("max_tokens", "min_tokens") if name in settings}
    config = LoadConfig(**({"requests": 6, "concurrency": 2} | settings))
    sampling = SamplingParams(seed=100, temperature=temperature, **params)
    prompts = [PromptLine("a"), PromptLine("b")]
    told: list[str] = []
    return LoadTest(cast(AsyncClient, client), config, prompts, sampling, SpeculationParams(), told.append)


@pytest.fixture
def stats(make_answer: Any) -> Any:
    """What a server counts."""
    return make_answer()


async def test_warm_up_requests_are_not_counted(stats: Any) -> None:
    client = FakeClient(stats)
    report = await a_test(client, warm_up=3).run()
    assert [asked["seed"] for asked in client.asked] == [100, 101, 102, *range(100, 106)]
    assert [outcome.number for outcome in report.outcomes] == list(range(6))
    assert report.sound
    assert report.verification is None


async def test_requests_have_deadlines_and_cold_ones_own_salts(stats: Any) -> None:
    cold, warm = FakeClient(stats), FakeClient(stats)
    await a_test(cold, cold_prompts=True, verify=6, timeout=3.0).run()
    await a_test(warm, timeout=3.0).run()
    assert len({asked["cache_salt"] for asked in cold.asked}) == len(cold.asked) == 1 + 6 + 6
    assert {asked["cache_salt"] for asked in warm.asked} == {""}
    assert {asked["timeout"] for asked in [*cold.asked, *warm.asked]} == {3.0}


async def test_random_prompts_are_always_cold(stats: Any) -> None:
    """Also after the warm-up and in a repeated test."""
    client = FakeClient(stats)
    for _ in range(2):
        await a_test(client, prompt_tokens=20).run()
    assert len({asked["cache_salt"] for asked in client.asked}) == len(client.asked) == 2 * 7
    assert len({asked["prompt"] for asked in client.asked}) == 6


async def test_a_rate_without_due_requests_is_an_error(stats: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="duration: is too short: no request was due"):
        await a_test(FakeClient(stats), rate=1e-6, duration=0.01).run()


# With the seed of these tests six arrivals in two milliseconds, and the next one after 4.8 seconds.
IN_A_BURST: dict[str, Any] = {"rate": 1.0, "burstiness": 0.02, "concurrency": None}


async def test_a_rate_is_over_the_whole_duration(stats: Any) -> None:
    """Requests could have come until its end."""
    report = await a_test(FakeClient(stats), **IN_A_BURST, requests=None, duration=4.0).run()
    assert (len(report.outcomes), report.seconds) == (6, 4.0)
    assert report.summary.requests_per_second == 6 / 4
    assert report.client_cpu > 0


async def test_a_rate_by_requests_ends_with_the_last_answer(stats: Any) -> None:
    report = await a_test(FakeClient(stats), **IN_A_BURST, requests=6, duration=1000.0).run()
    assert report.seconds == max(outcome.ended for outcome in report.outcomes) < 1000


async def test_a_rate_of_a_stopped_test_ends_with_the_last_answer(stats: Any) -> None:
    _, report = await stopped_at(
        stats, 1 + 3, **{**IN_A_BURST, "requests": None, "duration": 1000.0, "concurrency": 2}
    )
    assert report.seconds == max(outcome.ended for outcome in report.outcomes) < 1000


def test_impossible_answers_are_refused_before_sending(stats: Any) -> None:
    client = FakeClient(stats)
    with pytest.raises(InvalidArgumentError, match=r"^min_tokens: must be at most 5"):
        a_test(client, length_spread=0.5, max_tokens=10, min_tokens=8)
    assert not client.asked


@pytest.mark.planted
async def test_an_answer_changed_by_a_draft_is_found(stats: Any) -> None:
    client = FakeClient(stats, wrong_seed=103)
    report = await a_test(client, verify=6).run()
    assert report.verification.compared == 6
    assert report.verification.differences == (Difference(3, 0),)
    assert not report.sound
    again = client.asked[1 + 6 :]
    assert [(asked["seed"], asked["drafts"]) for asked in again] == [(100 + i, False) for i in range(6)]


@pytest.mark.parametrize("mode", [AcceptanceMode.REJECTION, AcceptanceMode.BLOCK])
async def test_an_unverifiable_server_mode_is_refused(stats: Any, mode: AcceptanceMode) -> None:
    client = FakeClient(stats, mode=mode)
    with pytest.raises(InvalidArgumentError, match="verify"):
        await a_test(client, verify=1).run()
    assert len(client.asked) == 1
    assert (await a_test(FakeClient(stats, mode=mode)).run()).sound
    assert (await a_test(FakeClient(stats, mode=mode), verify=1, temperature=0.0).run()).sound


async def test_a_server_without_a_model_is_an_error(stats: Any) -> None:
    with pytest.raises(UnavailableError, match="no model"):
        await a_test(FakeClient(stats, models_offered=())).run()


async def stopped_at(stats: Any, number: int, **settings: Any) -> tuple[FakeClient, Report]:
    def stop(asked: int) -> None:
        if asked == number:
            test.stop()

    client = FakeClient(stats, on_call=stop)
    test = a_test(client, **({"concurrency": 1} | settings))
    return client, await test.run()


async def test_a_stopped_test_reports_what_was_sent(stats: Any) -> None:
    client, report = await stopped_at(stats, 3, verify=6)
    assert len(client.asked) == 1 + 3
    assert report.stopped
    assert len(report.outcomes) == 3
    assert (report.verification.compared, report.verification.unasked) == (0, 3)
    assert not report.sound


async def test_a_test_stopped_while_verifying_reports_progress(stats: Any) -> None:
    _, report = await stopped_at(stats, 1 + 6 + 1, verify=6)
    assert report.stopped
    assert (report.verification.compared, report.verification.unasked) == (2, 4)


async def test_a_test_stopped_during_warm_up_reports_nothing(stats: Any) -> None:
    """The remaining warm-up requests are not sent."""
    client = FakeClient(stats, on_call=lambda asked: test.stop() if asked == 1 else None)
    test = a_test(client, warm_up=50)
    with pytest.raises(PacelineError, match="before anything was sent"):
        await test.run()
    assert len(client.asked) == 2


async def test_a_test_cut_short_waits_for_nothing(stats: Any) -> None:
    """A request may hang."""
    client = FakeClient(stats, hangs=True, on_call=lambda asked: test.cut() if asked == 2 else None)
    test = a_test(client)
    report = await asyncio.wait_for(test.run(), 30)
    assert dict(report.summary.failed) == {"CancelledError": 2}
    assert not report.sound
