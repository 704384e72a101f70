"""Metrics against slow counts of the same rounds."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.app import Coordinator
from coordinator.requests.observer import RequestRecord
from coordinator.scheduling.running_sequence import Running
from coordinator.sequence.ledger import Commit, Finish
from coordinator.sequence.round_record import RoundRecord
from coordinator.telemetry.metrics import PHASES, Metrics
from paceline.core.errors import CancelledError, InvalidArgumentError, PacelineError, StaleEpochError
from paceline.core.types import FinishReason, SamplingParams, Timings, TokenOrigin
from tests.sim.rounds import chain
from tests.unit.coordinator.machines import make_call

SECONDS = 30.0  # after which a test has failed


def sequence(prompt: int = 7, **more: Any) -> Any:
    values: dict[str, Any] = {"arrived_at": 0.0, "admitted_at": 0.0, "received": 0, "error": None}
    values |= {"first_token_at": None, "last_token_at": None}
    ledger = SimpleNamespace(prompt_length=prompt, num_generated=0, finish=None)
    state = SimpleNamespace(ledger=ledger)
    return SimpleNamespace(state=state, **(values | more))


def generation(arrived_at: float = 0.0) -> Any:
    return SimpleNamespace(choices=[sequence(arrived_at=arrived_at)])


def play(metrics: Metrics, running: Any, record: RoundRecord, now: float) -> None:
    """As the dispatcher does."""
    if running.first_token_at is None:
        running.first_token_at = record.ended
    metrics.round_ended(running, record, now)
    running.last_token_at = record.ended
    running.state.ledger.num_generated += record.num_tokens


@pytest.mark.parametrize("seed", range(20))
def test_round_counts_equal_a_slow_count(seed: int) -> None:
    rng, metrics, running = random.Random(seed), Metrics(), sequence()
    now, rounds = 1.0, []
    for number in range(1, rng.randint(2, 40)):
        source = rng.choice(["", "constant", "prompt-lookup"])
        record = RoundRecord(number, now, hit=rng.random() < 0.3, prefills=number == 1, source=source)
        k = 0 if number == 1 else rng.randint(0, 8)
        if k and not record.hit:
            waited = rng.random()
            record.drafted(waited, Timings(rng.random(), rng.random()))
            now += waited
        waited = rng.random()
        now += waited
        accepted = rng.randint(0, k)
        origins = [*[TokenOrigin.ACCEPTED] * accepted, TokenOrigin.CORRECTION][: rng.randint(1, accepted + 1)]
        commit = Commit(0, (1,) * len(origins), tuple(origins), "")
        record.judged(now, waited, chain(k), Timings(rng.random(), rng.random()), commit)
        spent = rng.random() / 100
        play(metrics, running, record, now + spent)
        rounds.append((record, now + spent))
    records = [record for record, _ in rounds]
    assert metrics.rounds == len(rounds)
    assert metrics.num_drafts == sum(r.num_draft > 0 for r in records)
    assert metrics.num_draft_tokens == sum(r.num_draft for r in records)
    assert metrics.num_accepted_tokens == sum(r.num_accepted for r in records)
    for source in ("draft", "constant", "prompt-lookup"):
        its = [r for r in records if r.num_draft and (r.source or "draft") == source]
        counts = metrics.by_source[source]
        assert counts.num_rounds == len(its)
        assert counts.num_draft_tokens == sum(r.num_draft for r in its)
        assert counts.num_accepted_draft_tokens == sum(r.num_accepted for r in its)
    assert metrics.prompt_lookups == metrics.by_source["prompt-lookup"].num_rounds
    assert metrics.lookahead_hits == sum(r.hit for r in records)
    assert metrics.generation_tokens == sum(r.num_tokens for r in records)
    assert metrics.prompt_tokens == 7
    for position, count in enumerate(metrics.accepted_at):
        assert count == sum(r.num_accepted > position for r in records)
    assert metrics.inter_token.count == sum(r.num_tokens for r in records[1:])
    assert metrics.inter_token.sum == pytest.approx(records[-1].ended - records[0].ended)
    # No part is negative, and together they are the whole: nothing is counted twice, nothing is lost.
    whole = sum(told - record.began for record, told in rounds)
    assert metrics.round_seconds.sum == pytest.approx(whole)
    assert sum(metrics.phases[phase].sum for phase in PHASES) == pytest.approx(whole)
    assert all(metrics.phases[phase].sum >= 0 for phase in PHASES)
    assert metrics.phases["prefill"].count == 1
    assert metrics.phases["verify"].count == len(rounds) - 1
    assert metrics.phases["draft"].count == sum(r.draft is not None for r in records)


def test_request_times_are_split_into_phases() -> None:
    metrics, running = Metrics(), sequence(arrived_at=1.0, admitted_at=1.5)
    running.first_token_at, running.last_token_at = 2.5, 6.5
    running.state.ledger.num_generated = 5
    running.state.ledger.finish = Finish(FinishReason.STOP)
    metrics.sequence_ended(running, 7.0)
    sums = {part: histogram.sum for part, histogram in metrics.request_seconds.items()}
    assert sums == {"e2e": 5.5, "queue": 0.5, "prefill": 1.0, "decode": 4.0, "inference": 5.0}
    assert (metrics.token_seconds.count, metrics.token_seconds.sum) == (1, 1.0)
    assert metrics.finished == {"stop": 1}


def test_received_tokens_take_no_time() -> None:
    """Times after a restart are of the tokens generated since."""
    metrics, running = Metrics(), sequence(received=500, first_token_at=2.0, last_token_at=3.0)
    running.state.ledger.num_generated = 511
    running.state.ledger.finish = Finish(FinishReason.STOP)
    metrics.sequence_ended(running, 3.0)
    assert (metrics.token_seconds.count, metrics.token_seconds.sum) == (1, 0.1)
    assert metrics.request_generation_tokens.sum == 11


def test_an_aborted_or_failed_sequence_has_no_latency() -> None:
    metrics = Metrics()
    metrics.sequence_ended(sequence(), 1.0)
    metrics.sequence_ended(sequence(error=InvalidArgumentError("a", "b")), 1.0)
    assert metrics.finished == {"abort": 1}
    assert all(histogram.count == 0 for histogram in metrics.request_seconds.values())


@pytest.mark.parametrize(
    ("error", "failed"),
    [(None, {}), (CancelledError("left"), {}), (InvalidArgumentError("a", "b"), {"INVALID_ARGUMENT": 1})],
)
def test_failed_requests_are_counted_by_code(error: PacelineError | None, failed: dict[str, int]) -> None:
    metrics = Metrics()
    call: Any = SimpleNamespace(sampling=SamplingParams(n=2, max_tokens=30))
    request = RequestRecord(call, "m", 0.0, error=error)
    metrics.request_ended(request)
    assert metrics.failed == failed
    assert metrics.params_n.count == 0
    request.generation = generation()
    metrics.request_ended(request)
    assert (metrics.params_n.sum, metrics.params_max_tokens.sum) == (2, 30)


def test_a_resumed_request_counts_once_without_failure() -> None:
    """Calls that lost it to a later call have not failed."""
    metrics = Metrics()
    call: Any = SimpleNamespace(sampling=SamplingParams(n=2, max_tokens=30))
    lost, taken_over = CancelledError("the client went away"), StaleEpochError("resumed by another call")
    for began, error in ((1.0, lost), (2.0, taken_over), (3.0, None)):
        request = RequestRecord(call, "m", began, error=error)
        request.generation = generation(arrived_at=1.0)
        metrics.request_ended(request)
    assert metrics.failed == {}
    assert (metrics.params_n.count, metrics.params_max_tokens.count) == (1, 1)


async def test_a_call_losing_its_request_has_not_failed(served: Coordinator) -> None:
    received = served.vocabulary.tokenizer.encode("def f").ids
    call = make_call(received=received)
    running: asyncio.Queue[Running] = asyncio.Queue()

    async def read() -> None:
        async with served.generating(call) as generation:
            running.put_nowait(generation.choices[0])
            async for _ in served.parts(generation):
                pass

    async with asyncio.timeout(SECONDS):
        first = asyncio.create_task(read())
        choice = await running.get()
        second = asyncio.create_task(read())
        assert await running.get() is choice
        with pytest.raises(StaleEpochError):
            await first
        second.cancel()
        await asyncio.wait([second])
    assert choice.received == len(received)
    assert served.metrics.failed == {}
    assert served.metrics.params_n.count == 1
