"""The plan of a load: requests and their times, before anything is sent."""

from __future__ import annotations

import statistics
from itertools import islice, pairwise
from typing import Any

import pytest
from harness.refusals import refused

from paceline.core import limits
from paceline.core.types import SamplingParams
from paceline.loadtest.config import LoadConfig
from paceline.loadtest.plan import LoadPlan, arrivals, check_lengths
from paceline.loadtest.prompts import PromptLine

PROMPTS = [PromptLine("a"), PromptLine((1, 2), max_tokens=5), PromptLine("c")]
SAMPLING = SamplingParams(max_tokens=9, seed=40, top_k=3)


def plan(sampling: SamplingParams = SAMPLING, **settings: Any) -> LoadPlan:
    return LoadPlan(LoadConfig(**settings), PROMPTS, sampling, 300)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_requested_mean_and_spread(burstiness: float) -> None:
    due = [0.0, *islice(arrivals(8.0, burstiness, 3), 20_000)]
    gaps = [later - earlier for earlier, later in pairwise(due)]
    assert min(gaps) >= 0
    # Of 20,000 gaps: four standard errors of the mean, and of a standard deviation with its heavier tail.
    error = 1 / (burstiness * len(gaps)) ** 0.5
    assert statistics.fmean(gaps) == pytest.approx(1 / 8, rel=4 * error)
    variation = statistics.stdev(gaps) / statistics.fmean(gaps)
    assert variation == pytest.approx(burstiness**-0.5, rel=8 / len(gaps) ** 0.5 * max(1, burstiness**-0.5))


def test_arrivals_are_reproducible_by_seed() -> None:
    first, second, other = (list(islice(arrivals(2.0, 1.0, seed), 50)) for seed in (1, 1, 2))
    assert first == second != other


def test_prompts_rotate_and_seeds_count_up() -> None:
    asks = list(plan(requests=7))
    assert [a.number for a in asks] == list(range(7))
    assert [a.prompt for a in asks] == ["a", (1, 2), "c", "a", (1, 2), "c", "a"]
    assert [a.sampling.seed for a in asks] == list(range(40, 47))
    assert [a.sampling.max_tokens for a in asks] == [9, 5, 9, 9, 5, 9, 9]
    assert {a.sampling.top_k for a in asks} == {3}
    assert {a.due for a in asks} == {None}


def test_a_request_can_be_planned_again_by_number() -> None:
    for settings in ({}, {"prompt_tokens": 20, "length_spread": 0.5}):
        found = plan(requests=7, rate=3.0, **settings)
        assert [found.ask(planned.number, planned.due) for planned in found] == list(found)


def test_seeds_begin_at_0_and_wrap_around() -> None:
    assert plan(SamplingParams()).ask(3).sampling.seed == 3
    last = plan(SamplingParams(seed=limits.MAX_SEED))
    assert [last.ask(number).sampling.seed for number in (0, 1)] == [limits.MAX_SEED, 0]


def test_a_rate_gives_every_request_a_due_time() -> None:
    asks = list(plan(requests=50, rate=4.0))
    assert [a.due for a in asks] == list(islice(arrivals(4.0, 1.0, 40), 50))


def test_nothing_is_due_after_the_duration() -> None:
    asks = list(plan(duration=10.0, rate=20.0))
    due = [a.due for a in asks if a.due is not None]
    assert len(due) == len(asks)
    assert max(due) < 10
    assert len(asks) == pytest.approx(200, abs=4 * 200**0.5)
    assert len(list(plan(duration=10.0, rate=20.0, requests=5))) == 5


def test_a_closed_loop_with_a_duration_is_endless() -> None:
    asks = list(islice(plan(duration=1.0), 10_000))
    assert len(asks) == 10_000


def test_random_prompts_have_the_length_and_no_common_prefix() -> None:
    prompts = [a.prompt for a in plan(requests=40, prompt_tokens=50)]
    assert {len(prompt) for prompt in prompts} == {50}
    assert len({prompt[:3] for prompt in prompts}) == 40
    token_ids = {token_id for prompt in prompts for token_id in prompt}
    assert {type(token_id) for token_id in token_ids} == {int}
    assert token_ids <= set(range(300))
    assert len(token_ids) > 250


def test_lengths_are_spread_around_the_requested_one() -> None:
    asks = list(plan(SamplingParams(max_tokens=100), requests=400, prompt_tokens=60, length_spread=0.5))
    for lengths, middle in (
        ([len(a.prompt) for a in asks], 60),
        ([a.sampling.max_tokens or 0 for a in asks], 100),
    ):
        assert 0.5 * middle <= min(lengths) < 0.6 * middle
        assert 1.4 * middle < max(lengths) <= 1.5 * middle
        assert statistics.fmean(lengths) == pytest.approx(middle, rel=0.06)
    shortest = plan(SamplingParams(max_tokens=1), requests=50, prompt_tokens=1, length_spread=0.9)
    assert min(min(len(a.prompt), a.sampling.max_tokens or 0) for a in shortest) == 1


def test_a_lines_own_length_is_kept() -> None:
    asks = plan(requests=30, length_spread=0.9)
    assert {a.sampling.max_tokens for a in asks if a.prompt == (1, 2)} == {5}
    assert len({a.sampling.max_tokens for a in asks if a.prompt != (1, 2)}) > 3


@pytest.mark.parametrize(
    ("settings", "sampling", "field"),
    [
        ({"length_spread": 0.5}, {"max_tokens": 100, "min_tokens": 51}, "min_tokens"),
        ({}, {"max_tokens": 100, "min_tokens": 6}, "min_tokens"),
        ({}, {"max_tokens": None, "min_tokens": 6}, "min_tokens"),
        ({"length_spread": 0.5}, {"max_tokens": limits.MAX_TOKENS}, "length_spread"),
    ],
)
def test_impossible_answer_lengths_are_refused_by_name(
    settings: dict[str, Any], sampling: dict[str, Any], field: str
) -> None:
    lines = PROMPTS if sampling.get("min_tokens") == 6 else PROMPTS[:1]
    with refused(field):
        check_lengths(LoadConfig(**settings), lines, SamplingParams(**sampling))


@pytest.mark.parametrize(
    ("settings", "lines", "sampling"),
    [
        ({"length_spread": 0.5}, PROMPTS[:1], {"max_tokens": 100, "min_tokens": 50}),
        ({"length_spread": 0.9}, PROMPTS[:1], {"max_tokens": 1, "min_tokens": 1}),
        ({}, PROMPTS, {"max_tokens": 100, "min_tokens": 5}),
        ({}, PROMPTS[:1], {"max_tokens": None, "min_tokens": 70}),
        ({"length_spread": 0.9}, PROMPTS[1:2], {"max_tokens": 9, "min_tokens": 5}),
        ({"prompt_tokens": 7}, PROMPTS, {"max_tokens": 100, "min_tokens": 100}),
    ],
)
def test_accepted_settings_can_be_planned(
    settings: dict[str, Any], lines: list[PromptLine], sampling: dict[str, Any]
) -> None:
    config, params = LoadConfig(requests=300, **settings), SamplingParams(**sampling)
    check_lengths(config, lines, params)
    assert len(list(LoadPlan(config, lines, params, 300))) == 300
