"""Configurations of the measured services; none is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from paceline.bench import services
from paceline.bench.config import QUICK, BenchConfig
from paceline.supervisor import StackConfig


class Started(Exception):  # noqa: N818 - no error, an end
    """With what."""


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[[BenchConfig], StackConfig]:
    """What would be started."""

    def serve_stack(config: StackConfig, **more: Any) -> Any:
        raise Started(config)

    def of(config: BenchConfig) -> StackConfig:
        with pytest.raises(Started) as started, services.serve(config, [(1, 2)], print):
            pass
        (found,) = started.value.args
        assert isinstance(found, StackConfig)
        return found

    monkeypatch.setattr(services, "serve_stack", serve_stack)
    return of


def test_every_request_computes_its_prompt(start: Callable[[BenchConfig], StackConfig]) -> None:
    """As peers do; no arm finds an earlier arm's prompt in the cache."""
    config = start(QUICK)
    assert not config.worker_config("target").prefix_cache
    assert not config.worker_config("draft").prefix_cache


@pytest.mark.parametrize(("given", "used"), [(None, "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu")])
def test_the_draft_may_have_its_own_device(
    start: Callable[[BenchConfig], StackConfig], given: str | None, used: str
) -> None:
    config = start(replace(QUICK, device="cuda:0", draft_device=given))
    assert config.worker_config("target").device == "cuda:0"
    assert config.worker_config("draft").device == used
