"""Checks of a benchmark before it measures or starts anything."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.bench import run
from paceline.bench.config import QUICK, BenchConfig
from paceline.bench.services import Services
from paceline.bench.workload import Prompt, answer_lengths
from paceline.core.errors import InvalidArgumentError

LENGTH = 100
"""Of the model."""
PROMPTS: list[Prompt] = [(1,) * 30, (1, 2)]
SEVERAL = replace(QUICK, concurrency=(1, 4), max_tokens=48)


class Measuring(Exception):  # noqa: N818 - no error, an end
    """It would begin."""


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run as far as to the first measurement."""

    class Client:
        def __init__(self, address: str) -> None: ...

        async def __aenter__(self) -> Client:
            return self

        async def __aexit__(self, *_: object) -> None: ...

        async def status(self) -> Any:
            workers = [SimpleNamespace(role="target", info=SimpleNamespace(max_model_len=LENGTH))]
            return SimpleNamespace(workers=workers)

    def begin(*_: Any) -> None:
        raise Measuring

    monkeypatch.setattr(run, "AsyncClient", Client)
    monkeypatch.setattr(run, "_peers", begin)
    services = Services("a:1", "b:1", "c:1")
    return lambda config: run._measure(config, services, PROMPTS, lambda _: None, 0.0)


@pytest.mark.parametrize(
    "config", [replace(QUICK, max_tokens=71), SEVERAL, replace(SEVERAL, concurrency=(4,))]
)
async def test_too_long_answers_are_refused_first(measure: Any, config: BenchConfig) -> None:
    """Otherwise the refusal would come after the measurements at one request."""
    with pytest.raises(InvalidArgumentError, match=f"length of {LENGTH}") as refused:
        await measure(config)
    assert refused.value.field == "max_tokens"


@pytest.mark.parametrize("config", [replace(QUICK, max_tokens=70), replace(SEVERAL, max_tokens=46)])
async def test_fitting_answers_are_measured(measure: Any, config: BenchConfig) -> None:
    """One request at a time has no spread."""
    with pytest.raises(Measuring):
        await measure(config)


@pytest.mark.parametrize("config", [QUICK, SEVERAL])
def test_no_answer_exceeds_the_longest(config: BenchConfig) -> None:
    for clients in config.concurrency:
        for client in range(clients):
            lengths = answer_lengths(config.max_tokens, client, 8 if clients > 1 else 1)
            assert max(lengths) <= config.longest_answer
