"""What is sent when: known before anything is sent."""

from __future__ import annotations

import statistics
from itertools import islice, pairwise

import pytest

from paceline.core import limits
from paceline.core.types import SamplingParams
from paceline.loadtest.config import LoadConfig
from paceline.loadtest.plan import Ask, arrivals, ask, plan
from paceline.loadtest.prompts import PromptLine

PROMPTS = [PromptLine("a"), PromptLine((1, 2), max_tokens=5), PromptLine("c")]
SAMPLING = SamplingParams(max_tokens=9, seed=40, top_k=3)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_spread_that_were_asked_for(burstiness: float) -> None:
    due = list(islice(arrivals(8.0, burstiness, 3), 20_001))
    assert due[0] == 0
    gaps = [later - earlier for earlier, later in pairwise(due)]
    assert min(gaps) >= 0
    # Of 20,000 gaps: four standard errors of the mean, and of a standard deviation with its heavier tail.
    error = 1 / (burstiness * len(gaps)) ** 0.5
    assert statistics.fmean(gaps) == pytest.approx(1 / 8, rel=4 * error)
    variation = statistics.stdev(gaps) / statistics.fmean(gaps)
    assert variation == pytest.approx(burstiness**-0.5, rel=8 / len(gaps) ** 0.5 * max(1, burstiness**-0.5))


def test_arrivals_of_a_seed_are_always_the_same() -> None:
    first, second, other = (list(islice(arrivals(2.0, 1.0, seed), 50)) for seed in (1, 1, 2))
    assert first == second != other


def test_prompts_come_in_turn_and_seeds_count_up() -> None:
    asks = list(plan(LoadConfig(requests=7), PROMPTS, SAMPLING))
    assert [a.number for a in asks] == list(range(7))
    assert [a.prompt for a in asks] == ["a", (1, 2), "c", "a", (1, 2), "c", "a"]
    assert [a.sampling.seed for a in asks] == list(range(40, 47))
    assert [a.sampling.max_tokens for a in asks] == [9, 5, 9, 9, 5, 9, 9]
    assert {a.sampling.top_k for a in asks} == {3}
    assert {a.due for a in asks} == {None}


def test_a_request_can_be_planned_again_by_its_number() -> None:
    for planned in plan(LoadConfig(requests=7, rate=3.0), PROMPTS, SAMPLING):
        assert ask(PROMPTS, SAMPLING, planned.number, planned.due) == planned


def test_seeds_begin_at_0_where_none_is_given_and_begin_again_behind_the_last() -> None:
    assert ask(PROMPTS, SamplingParams(), 3).sampling.seed == 3
    last = SamplingParams(seed=limits.MAX_SEED)
    assert [ask(PROMPTS, last, number).sampling.seed for number in (0, 1)] == [limits.MAX_SEED, 0]


def test_a_rate_gives_every_request_its_time() -> None:
    asks = list(plan(LoadConfig(requests=50, rate=4.0), PROMPTS, SAMPLING))
    assert [a.due for a in asks] == list(islice(arrivals(4.0, 1.0, 40), 50))


def test_nothing_is_due_after_the_duration() -> None:
    asks: list[Ask] = list(plan(LoadConfig(duration=10.0, rate=20.0), PROMPTS, SAMPLING))
    due = [a.due for a in asks if a.due is not None]
    assert len(due) == len(asks)
    assert max(due) < 10
    assert len(asks) == pytest.approx(200, abs=4 * 200**0.5)
    assert len(list(plan(LoadConfig(duration=10.0, rate=20.0, requests=5), PROMPTS, SAMPLING))) == 5


def test_a_closed_loop_of_a_duration_has_no_last_request() -> None:
    asks = list(islice(plan(LoadConfig(duration=1.0), PROMPTS, SAMPLING), 10_000))
    assert len(asks) == 10_000
