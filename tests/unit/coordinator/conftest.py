"""A coordinator without processes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from harness.links import link_workers

from coordinator.app import Coordinator
from coordinator.text.vocabulary import Vocabulary
from coordinator.workers.links import LinkState
from paceline.core.config import CoordinatorConfig
from paceline.v1 import common_pb2


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return Vocabulary.load("embedded:target")


@pytest.fixture
async def coordinator(vocabulary: Vocabulary) -> AsyncIterator[Coordinator]:
    config = CoordinatorConfig(targets=("a:1", "b:1"), tokenizer="embedded:target")
    made = Coordinator(config, vocabulary)
    link_workers(made)
    yield made
    made.close()


@pytest.fixture
def served(coordinator: Coordinator) -> Coordinator:
    """One whose target was there, and is away for now: no request comes to an end."""
    link = coordinator.dispatcher.workers.targets[0]
    link.known = link.admitted = common_pb2.WorkerInfo(
        model="m", max_model_len=100, vocabulary_size=coordinator.vocabulary.size, eos_token_ids=[0]
    )
    link.state = LinkState.LOST
    coordinator._target_found.set()
    return coordinator
