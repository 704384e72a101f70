"""Settings of a load test that are refused, by field."""

from __future__ import annotations

import math
from typing import Any

import pytest
from harness.refusals import refused

from paceline.core.errors import InvalidArgumentError
from paceline.core.types import AcceptanceMode, SamplingParams
from paceline.loadtest.config import LoadConfig, check_request


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("requests", 0),
        ("duration", 0.0),
        ("rate", -1.0),
        ("rate", math.nan),
        ("rate", math.inf),
        ("burstiness", 0.0),
        ("concurrency", 0),
        ("prompt_tokens", 0),
        ("length_spread", -0.1),
        ("length_spread", 1.0),
        ("length_spread", math.nan),
        ("warm_up", 0),
        ("verify", -1),
        ("timeout", 0.0),
        ("timeout", 2e9),
        ("goal_ttft", 0.0),
        ("goal_tpot", math.nan),
        ("goal_e2e", -1.0),
    ],
)
def test_an_invalid_setting_is_refused_by_name(field: str, value: float) -> None:
    values: dict[str, Any] = {"rate": 1.0} | {field: value}
    with refused(field):
        LoadConfig(**values)


def test_burstiness_without_a_rate_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="burstiness"):
        LoadConfig(burstiness=0.5)
    LoadConfig(burstiness=0.5, rate=1.0)


def test_the_end_is_set_by_requests_or_duration() -> None:
    assert LoadConfig().most_requests == 100
    assert LoadConfig(duration=3.0).most_requests is None
    assert LoadConfig(duration=3.0, requests=7).most_requests == 7


def test_an_open_loop_is_unbounded_by_default() -> None:
    assert LoadConfig().places == 8
    assert LoadConfig(rate=1.0).places is None
    assert LoadConfig(rate=1.0, concurrency=3).places == 3


def test_goals_are_those_that_were_set() -> None:
    assert LoadConfig().goals == {}
    assert LoadConfig(goal_ttft=0.5, goal_e2e=2.0).goals == {"ttft": 0.5, "e2e": 2.0}


def test_several_completions_per_request_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^n: "):
        check_request(LoadConfig(), SamplingParams(n=2), None)


@pytest.mark.parametrize("mode", list(AcceptanceMode))
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_draft_dependent_modes_cannot_be_verified(mode: AcceptanceMode, temperature: float) -> None:
    config, sampling = LoadConfig(verify=3), SamplingParams(temperature=temperature)
    check_request(config, sampling, None)
    check_request(LoadConfig(), sampling, mode)
    if mode is AcceptanceMode.COUPLED or temperature == 0:
        check_request(config, sampling, mode)
        return
    with pytest.raises(InvalidArgumentError, match=mode.value) as caught:
        check_request(config, sampling, mode)
    assert caught.value.field == "verify"


def test_a_length_spread_needs_a_length() -> None:
    config, endless = LoadConfig(length_spread=0.5), SamplingParams(max_tokens=None)
    with pytest.raises(InvalidArgumentError, match="length_spread"):
        check_request(config, endless, None)
    check_request(config, SamplingParams(), None)
    check_request(LoadConfig(), endless, None)
