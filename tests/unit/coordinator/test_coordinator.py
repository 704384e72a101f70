"""What a coordinator knows of its targets, and that it does not outlive its own work."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator import main
from coordinator.coordinator import Coordinator
from coordinator.links import LinkState
from coordinator.vocabulary import Vocabulary
from paceline.core.config import CoordinatorConfig
from paceline.core.errors import InternalError, UnavailableError
from paceline.v1 import common_pb2

SECONDS = 30.0


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.load("embedded:target")


@pytest.fixture
async def coordinator(vocabulary: Vocabulary) -> Coordinator:
    config = CoordinatorConfig(targets=("a:1", "b:1"), tokenizer="embedded:target")
    return Coordinator(config, vocabulary)


def info(model: str) -> common_pb2.WorkerInfo:
    return common_pb2.WorkerInfo(model=model, max_model_len=100)


async def test_what_was_refused_says_nothing_of_the_target(coordinator: Coordinator) -> None:
    """Once: a worker with another model, refused and then stopped, was what requests were checked against."""
    wrong, right = coordinator.dispatcher.targets
    wrong.known, wrong.state = info("wrong"), LinkState.REFUSED
    with pytest.raises(UnavailableError):
        coordinator.target_info()
    right.known = right.admitted = info("right")
    right.state = LinkState.READY
    assert coordinator.target_info().model == "right"
    wrong.state = LinkState.LOST
    assert coordinator.target_info().model == "right"


async def test_a_target_that_serves_says_more_than_one_that_did(coordinator: Coordinator) -> None:
    old, new = coordinator.dispatcher.targets
    old.admitted, old.state = info("old"), LinkState.LOST
    assert coordinator.target_info().model == "old"
    new.admitted, new.state = info("new"), LinkState.READY
    assert coordinator.target_info().model == "new"


async def test_metrics_keep_their_model_while_its_target_is_away(coordinator: Coordinator) -> None:
    assert coordinator.known_name == ""
    link = coordinator.dispatcher.targets[0]
    link.admitted, link.state = info("m"), LinkState.READY
    assert coordinator.known_name == "m"
    link.state = LinkState.LOST
    assert not coordinator.serving
    assert coordinator.known_name == "m"


async def test_a_coordinator_whose_links_died_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once: it lived on, answered nobody, and nobody restarted it."""

    async def die(_: Any) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(Coordinator, "run", die)
    config = CoordinatorConfig(targets=("127.0.0.1:1",), tokenizer="embedded:target", port=0, http_port=0)
    with pytest.raises(InternalError):
        await main._serve(config)
    assert "ValueError: a defect" in caplog.text
